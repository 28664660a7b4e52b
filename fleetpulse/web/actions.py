"""Actions of the operations page: DAGs that a button starts in Airflow, or commands to type.

Rule 1: this application starts nothing. In Airflow, the script ``actions.js`` posts to Airflow's own REST, as the
user of the page. Airflow decides whether the user may, checks the values by the form of the DAG, and records who
started the run.
Rule 2: an action that its user may not start, or that no Airflow can start, shows the command to type.
Rule 3: an action is listed only if its DAG exists (tests/dags/test_operations_page.py); without one it is a command.
Rule 4: an action on a list names its filter and the number of devices that match. The command counts them again.

Cross-site requests: Airflow's session cookie is ``SameSite=Lax``, so browsers do not send it with a POST of another
site, and Airflow's REST takes only a body of type JSON, which no form of another site can send. The content security
policy of `app` permits requests to the same origin only, and no inline script. All other routes are read-only.
"""

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from starlette.requests import Request

from fleetpulse.core.quality.table_suites import SUITES
from fleetpulse.io.home.home import Home


class Starter(Protocol):
    """Airflow, as far as the page needs it."""

    def base(self, request: Request) -> str:
        """Return the path of Airflow, without a slash at its end."""
        ...

    def startable(self, request: Request, dags: Collection[str]) -> frozenset[str]:
        """Return those of some DAGs of which the user of a request may start runs."""
        ...


@dataclass(frozen=True, slots=True)
class Field:
    """Field of an action's form: a parameter of its DAG.

    Attributes:
        name: name of the parameter.
        label: label for people.
        kind: type of the field: ``text``, ``required`` (text), ``date``, ``instant`` (UTC), ``choice``, ``policy`` or
            ``fixed``; a fixed field without a value has the id of the device.
        hint: explanation; may be empty.
        value: first value.
        choices: values of a ``choice``.
    """

    name: str
    label: str
    kind: str
    hint: str = ""
    value: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Action:
    """Action on the fleet, or on one device.

    Attributes:
        title: name, an imperative.
        effect: consequence, in one sentence.
        words: words of the command after ``./fleet``; ``{device}`` stands for the id of the device.
        dag: DAG that does the same; None if there is none.
        fields: fields of its form, as the DAG names them.
    """

    title: str
    effect: str
    words: tuple[str, ...]
    dag: str | None = None
    fields: tuple[Field, ...] = ()


_POLICY: Final = '[rules]\ntimeout = "10m"\n'
_ROLLOUT: Final = """\
name = "pumps-2.4.1"
version = "2.4.1"
scope = "device_class = 'pump'"
cohorts = [10, 50, 100]
soak = "2h"
"""
_RANGE: Final = (
    Field("from", "From", "instant", "UTC; empty: from the retention floor"),
    Field("to", "To", "instant", "UTC; empty: the frontier"),
)
_FOR: Final = Field("for", "For", "text", "such as 2h", "2h")


def _fixed(name: str, value: str = "") -> Field:
    return Field(name, name, "fixed", value=value)


def _one_device(action: str) -> tuple[Field, ...]:
    """Return the fields of a command about one device; the empty one becomes its id."""
    return _fixed("action", action), _fixed("device"), _fixed("expect", "1")


ACTIONS: Final[dict[str, Action]] = {
    "snapshot": Action("Take a snapshot", "Publishes the state of every device, for a bootstrap.", ("state", "snapshot"),
                       "fleet_snapshot"),
    "maintain": Action("Maintain the tables", "Compacts files, and deletes rows that are older than their retention.",
                       ("maintain",), "fleet_maintain"),
    "amend": Action("Judge late messages", "Replays the devices with late messages, and adds and retracts transitions.",
                    ("amend",), "fleet_amend",
                    (Field("since", "Late messages received since", "instant", "UTC; empty: since the last amend"),)),
    "report": Action("Report availability", "Computes the availability of the fleet for one day.",
                     ("availability", "--day", "YYYY-MM-DD"), "fleet_report",
                     (Field("day", "Day", "date", "UTC; empty: yesterday"),)),
    "quality": Action("Check data quality", "Runs the suites over the tables and the newest snapshot.", ("quality", "run"),
                      "fleet_quality",
                      (Field("suite", "Suite", "choice", choices=tuple(one.name for one in SUITES)),)),
    "backtest": Action("Backtest a policy", "Judges the retained messages under another policy, and compares the verdicts.",
                       ("backtest", "--policy", "policy.toml", "--html", "backtest.html"), "fleet_backtest",
                       (Field("policy", "Policy", "policy", "TOML", _POLICY), *_RANGE)),
    "judge-again": Action("Judge again", "Replays this device with its late messages, and adds and retracts transitions.",
                          ("amend", "--device", "{device}"), "fleet_amend", (Field("device", "Device", "fixed"),)),
    "hold": Action("Announce maintenance", "Silence of this device is expected for two hours.",
                   ("device", "maintain", "{device}", "--for", "2h"), "fleet_command", (*_one_device("maintain"), _FOR)),
    "confirm": Action("Confirm the flag", "Keeps the flag of this device until its release.", ("device", "confirm", "{device}")),
    "release": Action("Release", "Ends the update of this device, or clears its flag.", ("device", "release", "{device}"),
                      "fleet_command", _one_device("release")),
    "hold-all": Action("Announce maintenance", "Silence of these devices is expected for two hours.",
                       ("device", "bulk", "maintain", "--for=2h"), "fleet_command", (_fixed("action", "maintain"), _FOR)),
    "update-all": Action("Announce an update", "Silence of these devices is expected until they restart, for two hours.",
                         ("device", "bulk", "update", "--for=2h"), "fleet_command", (_fixed("action", "update"), _FOR)),
    "release-all": Action("Release", "Ends the updates of these devices, and clears their flags.",
                          ("device", "bulk", "release"), "fleet_command", (_fixed("action", "release"),)),
    "rollout": Action("Start a rollout", "Gives firmware to devices by cohort; Airflow asks a person before each cohort.",
                      ("rollout", "start", "plan.toml"), "fleet_rollout", (Field("plan", "Plan", "policy", "TOML", _ROLLOUT),)),
}  # fmt: skip
OF_DEVICE: Final = ("judge-again", "hold", "confirm", "release")
OF_LIST: Final = ("hold-all", "update-all", "release-all")
MOST_LISTED: Final = 500_000  # devices of one command
TYPED_FROM: Final = 1_000  # devices from which a form asks for their number
STATE_FORMS: Final = {  # DAG with a form of Airflow that asks for an approval -> title, command
    "fleet_bootstrap": ("Bootstrap from a snapshot", ("state", "bootstrap")),
    "fleet_migrate": ("Migrate to another stored form", ("state", "migrate")),
    "fleet_repartition": ("Change the partitions", ("state", "repartition", "PARTITIONS")),
    "fleet_rescale": ("Change the key groups", ("state", "rescale", "--key-groups", "KEY_GROUPS")),
}


@dataclass(frozen=True, slots=True)
class Offer:
    """Action as the user of a page may take it.

    Attributes:
        name: key of the action in `ACTIONS`.
        action: the action.
        may_start: whether the user may start its DAG.
        command: command to type.
        fields: fields of the form, with their first values.
    """

    name: str
    action: Action
    may_start: bool
    command: str
    fields: Sequence[Field]


def airflow_of(request: Request) -> str | None:
    """Return the path of Airflow; None if the page is not served inside of it."""
    starter: Starter | None = request.app.state.starter
    return None if starter is None else starter.base(request)


def offers(request: Request, *names: str, device: str = "") -> list[Offer]:
    """Return actions as the user of a request may take them.

    Args:
        request: request for the page.
        names: keys of the actions in `ACTIONS`.
        device: id of the device that they concern; empty for the fleet.
    """
    starter: Starter | None = request.app.state.starter
    chosen = [(name, ACTIONS[name]) for name in names]
    dags = {one.dag for _, one in chosen if one.dag is not None}
    startable = frozenset[str]() if starter is None else starter.startable(request, dags)
    return [
        Offer(
            name,
            one,
            one.dag in startable,
            command(request.app.state.home, one.words, device),
            [replace(field, value=field.value or device) if field.kind == "fixed" else field for field in one.fields],
        )
        for name, one in chosen
    ]


def list_offers(request: Request, filters: Mapping[str, str], count: int) -> list[Offer]:
    """Return actions on all devices that match a filter, as the user of a request may take them.

    Args:
        request: request for the page.
        filters: parameters of the filter, by name.
        count: number of devices that match.
    """
    expect = Field("expect", "Number of devices", "required", f"type {count} to confirm") if count > TYPED_FROM else None
    named = [expect or _fixed("expect", str(count)), *(_fixed(name, value) for name, value in filters.items())]
    words = [f"--{name.replace('_', '-')}={value}" for name, value in filters.items()]
    home: Home = request.app.state.home
    return [
        replace(
            one,
            command=command(home, (*one.action.words, f"--expect={count}", *words)),
            fields=[*one.fields, *named],
        )
        for one in offers(request, *OF_LIST)
    ]


def state_forms(request: Request) -> list[dict[str, Any]]:
    """Return the changes of the state: DAGs whose form is Airflow's, with the command to type."""
    home: Home = request.app.state.home
    return [{"dag": dag, "title": title, "command": command(home, words)} for dag, (title, words) in STATE_FORMS.items()]


def command(home: Home, words: Sequence[str], device: str = "") -> str:
    """Return a command line, quoted for a shell.

    Args:
        home: home that the command concerns.
        words: words after ``./fleet``; ``{device}`` stands for the id of the device.
        device: id of the device.
    """
    named, last = [device if word == "{device}" else word for word in words], list[str]()
    is_argument = "{device}" in words and not words[words.index("{device}") - 1].startswith("--")
    if is_argument and device.startswith("-"):  # otherwise, the id would be an option
        named.remove(device)
        last = ["--", device]
    return shlex.join(["./fleet", *named, "--home", str(home.path), *last])
