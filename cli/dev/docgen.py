"""Generator of reference documents, third-party notices and the Sparkplug codec.

The documents are the commands, data dictionary, lifecycle, policy, settings, runbooks, suites, metrics,
the HTTP API and the message schema. ``python -m cli.dev.docgen`` writes them; ``--check`` lists the stale
ones.
"""

import ast
import inspect
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Any, Final, cast

from typer.main import get_command

from cli.app import VERBS, app
from cli.dev.notices import NOTICES, notices
from fleetpulse.core.catalog import TABLES, VIEWS
from fleetpulse.core.lifecycle import TRANSITIONS, Mode, Trigger
from fleetpulse.core.messages.text import MAX_TEXT
from fleetpulse.core.policy import MAX_BYTES, MAX_CLASSES, RULES, Rules
from fleetpulse.core.quality.table_suites import SUITES
from fleetpulse.core.rows import FORMAT_VERSION, FROM_DEVICES
from fleetpulse.core.streams.commands import ANSWERS
from fleetpulse.core.streams.vitals import MAX_METRICS, MAX_WINDOWS, VITAL_KEYS
from fleetpulse.core.times import format_duration
from fleetpulse.paths import ROOT
from fleetpulse.settings import Settings
from fleetpulse.web import metric_table
from fleetpulse.web.access import WebRole
from fleetpulse.web.api.openapi import ALWAYS, PREFIX, pages
from fleetpulse.web.api.routes import operations
from fleetpulse.web.queries import MOST_ROWS

_COMMANDED: Final = (Trigger.MAINTAIN, Trigger.UPDATE, Trigger.DECOMMISSION)
CODEC: Final = "fleetpulse/io/mqtt/sparkplug/sparkplug_b"
_MARK: Final = "<!-- generated from {} by: python -m cli.dev.docgen -->\n\n"


def tables() -> str:
    """Return the data dictionary."""
    text = _MARK.format("fleetpulse/core/catalog.py") + "# Tables\n\nAll tables are Delta tables below a home's `tables/`.\n"
    for table in TABLES:
        text += f"\n## {table.name}\n\n{table.meaning}\n\nKey: {', '.join(f'`{name}`' for name in table.key)}."
        if table.partitioned_by:
            text += f" Partitioned by {', '.join(f'`{name}`' for name in table.partitioned_by)}."
        text += "\n\n| column | type | required | meaning |\n| --- | --- | --- | --- |\n"
        for column in table.columns:
            text += f"| `{column.name}` | {column.type} | {'yes' if column.required else ''} | {column.meaning} |\n"
    text += "\n## Views of judgements\n\n| view | rows |\n| --- | --- |\n"
    return text + "".join(f"| `{one.name}` | {one.meaning} |\n" for one in VIEWS)


def lifecycle_diagram() -> str:
    """Return the source of the lifecycle's figure: a Mermaid state diagram without the commands of operators."""
    edges: dict[tuple[Mode, Mode], list[str]] = {}
    for (mode, trigger), target in TRANSITIONS.items():
        if trigger not in _COMMANDED:
            edges.setdefault((mode, target), []).append(trigger.value)
    drawn = [f"    {mode.value} --> {target.value}: {', '.join(triggers)}\n" for (mode, target), triggers in edges.items()]
    head = (
        "---\nconfig:\n  htmlLabels: false\n  theme: neutral\n---\nstateDiagram-v2\n    direction LR\n    [*] --> provisioned\n"
    )
    return "".join([head, *drawn, "    forgotten --> [*]\n"])


def lifecycle() -> str:
    """Return the matrix of the device lifecycle, with its figure."""
    text = _MARK.format("fleetpulse/core/lifecycle.py") + "# Device lifecycle\n\n"
    text += """Modes of a device, and the mode that each trigger leads to. *live* stands for the first mode that applies:

1. provisioned, if the device was never heard;
2. unreachable, if maintenance or an update ends while the device's gateway is dead;
3. flagged, if its errors match the flagged sequence;
4. degraded, if too many errors are within the window;
5. online otherwise.

*amended* leads from any mode to the mode of the amended history. The figure leaves out *maintain*, *update* and
*decommission*, which lead from most modes to the mode that they name.
"""
    text += "\n![Modes and triggers, without the commands of operators](../images/lifecycle.svg)\n\n"
    text += "| mode | " + " | ".join(trigger.value for trigger in Trigger) + " |\n"
    text += "| --- |" + " --- |" * len(Trigger) + "\n"
    for mode in Mode:
        targets = (TRANSITIONS.get((mode, trigger)) for trigger in Trigger)
        cells = ("live" if target is Mode.ONLINE else target.value if target else "" for target in targets)
        text += f"| **{mode.value}** | " + " | ".join(cells) + " |\n"
    return text


def policy() -> str:
    """Return the table of rules."""
    text = _MARK.format("fleetpulse/core/policy.py") + "# Rules of a policy\n\n"
    text += 'A policy is a TOML file. It has `unknown_devices = "admit"` or `"quarantine"`, the rules of all classes in '
    text += "`[rules]`, and the exceptions of one class in `[classes.NAME]`.\n`fleet policy check FILE` shows the result.\n"
    text += (
        f"A policy can have at most {MAX_CLASSES} classes. A name or an error code has 1 to {MAX_TEXT} printable characters. The "
    )
    text += f"stored policy has at most {MAX_BYTES:,} bytes, because every key group keeps a copy.\n\n"
    text += '```toml\nunknown_devices = "admit"\n\n[rules]\ntimeout = "30m"\ndegraded.errors = 5\n\n'
    text += '[classes.meter]\ntimeout = "2h"\n```\n\n'
    text += "| rule | built in | meaning |\n| --- | --- | --- |\n"
    for name, rule in RULES.items():
        value = getattr(Rules(), name)
        shown = format_duration(value) if name.endswith("_ms") else ", ".join(value) if isinstance(value, tuple) else value
        text += f"| `{rule.key}` | {shown} | {rule.meaning} |\n"
    text += (
        "\n## Vitals\n`[vitals.METRIC]` names the windows of a metric, see [Vitals](../concepts/streams.md#vitals). A policy can "
    )
    text += f"have vitals of at most {MAX_METRICS} metrics, with at most {MAX_WINDOWS} different windows and slides.\n\n"
    text += '```toml\n[vitals.battery]\nwindow = "10m"\nbelow = 3.2\nfor = "20m"\n\n'
    text += '[vitals.load]\nwindow = "1h"\nslide = "15m"\n```\n\n'
    text += "| key | default | meaning |\n| --- | --- | --- |\n"
    for key, default, meaning in VITAL_KEYS:
        text += f"| `{key}` | {default} | {meaning} |\n"
    return text


def settings() -> str:
    """Return the table of settings, with the descriptions of their declarations."""
    text = _MARK.format("fleetpulse/settings.py") + "# Settings of an installation\n\n"
    text += "An environment variable overrides the home's `settings.toml`. Durations are written as `90s`, `5m`, `1h`, `2d`.\n\n"
    text += "| in settings.toml | in the environment | default | meaning |\n| --- | --- | --- | --- |\n"
    _, _, declared = inspect.cleandoc(Settings.__doc__ or "").partition("Attributes:\n")
    meanings = dict(re.findall(r"^    (\w+): (.*(?:\n        .*)*)", declared, re.MULTILINE))
    for name, field in Settings.model_fields.items():
        meaning = " ".join(meanings[name].replace("``", "`").split())
        text += f"| `{name}` | `FLEET_{name.upper()}` | {_default_of(field.default)} | {meaning} |\n"
    return text


def _default_of(value: object) -> str:
    return "none" if value == "" else f"`{value}`"


def dags() -> str:
    """Return the runbooks of the DAGs, from their docstrings."""
    runbooks = {path.stem: ast.get_docstring(ast.parse(path.read_text())) or "" for path in sorted((ROOT / "dags").glob("*.py"))}
    text = _MARK.format("the docstrings in dags/") + "# DAGs and their runbooks\n\n| DAG | purpose |\n| --- | --- |\n"
    for name, runbook in runbooks.items():
        text += f"| [`{name}`](#{name}) | {runbook.splitlines()[0].removeprefix('# ')} |\n"
    for name, runbook in runbooks.items():
        heading, _, rest = runbook.partition("\n")
        text += f"\n## {name}\n{heading.removeprefix('# ')}\n{rest}\n"
    return text


def schema() -> str:
    """Return the JSON Schema of a device's payload."""
    text = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT}
    whole = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
    named = {"anyOf": [text, {"type": "integer"}]}
    fields: dict[str, tuple[dict[str, Any], str]] = {
        "ts": ({"type": "number"}, "event time, epoch milliseconds; by default, the time of receipt"),
        "seq": (whole, "message counter of the device; without a boot, a decrease is a reboot, unless the counter wrapped"),
        "boot": (named, "id of the run of the firmware; a will of another boot is ignored if either names no session"),
        "session": (named, "id of the connection to the broker; a will of another session is ignored"),
        "uptime_s": (whole, "seconds since the last start"),
        "code": (named, "error code, in messages of kind error"),
        "firmware": (text, "firmware version"),
        "gateway": (text, "gateway that delivered the message; a will that names its own device is a gateway's death"),
        "metrics": ({"type": "object"}, "measured values"),
        "id": (named, "of kind ack: id of the command that it answers"),
        "status": ({"enum": [*ANSWERS]}, "of kind ack: whether the device accepted the command"),
        "reason": (text, "of kind ack: reason, for people"),
        "reported": ({"type": "object"}, "of kind ack: part of the state of the device, merged as in RFC 7396"),
        "device_id": (text, "optional; if present, it must equal that of the topic, as must site and kind"),
    }
    content = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"fleetpulse message, version {FORMAT_VERSION}",
        "description": f"Payload on fleet/<site>/<device_id>/<kind>, where kind is one of {', '.join(sorted(FROM_DEVICES))}.",
        "type": "object",
        "properties": {name: {**rule, "description": meaning} for name, (rule, meaning) in fields.items()},
    }
    return json.dumps(content, indent=2) + "\n"


def suites() -> str:
    """Return the suites of data quality, with their expectations."""
    text = _MARK.format("fleetpulse/core/quality/") + "# Suites of data quality\n\n"
    text += "For their use, and for what to do if one fails, see [data quality](../how-to/data-quality.md).\n"
    for suite in SUITES:
        text += f"\n## {suite.name}\n\n{suite.meaning}\nTable: `{suite.about}`."
        text += (
            " Compared with a replay of all messages since the first row of bronze, or since a snapshot."
            if suite.needs_replay
            else ""
        )
        text += "\n\n| expectation | severity | condition |\n| --- | --- | --- |\n"
        text += "".join(f"| {one.name} | {one.severity} | {one.meaning} |\n" for one in suite.expectations)
    return text


def metrics() -> str:
    """Return the table of metrics."""
    text = _MARK.format("fleetpulse/web/metric_table.py") + "# Metrics\n\n"
    text += "The route `/metrics` of `./fleet serve` answers with these metrics; see [Monitor a fleet](../how-to/monitor.md).\n\n"
    _, _, rules = inspect.cleandoc(metric_table.__doc__ or "").partition("\n\n")
    for rule in re.split(r"^Rule \d+: ", rules, flags=re.MULTILINE)[1:]:
        line = " ".join(rule.replace("``", "`").split())
        text += fill(f"- {line[0].upper()}{line[1:]}", 110, subsequent_indent="  ") + "\n"
    titles = (
        "Devices and judgements",
        "Messages",
        "Newest batch of the lifecycle job",
        "Processes and bridges",
        "Streams beside the lifecycle",
    )
    parts = [*zip(titles, metric_table.PARTS.items(), strict=True), ("Server", ("", metric_table.SERVER))]
    for title, (part, declared) in parts:
        text += f"\n## {title}\n\n"
        text += f"Part `{part}` of `fleetpulse_part_failed`.\n\n" if part else ""
        text += "| sample | kind | labels | meaning |\n| --- | --- | --- | --- |\n"
        for one in declared:
            labels = ", ".join(f"`{label}`" for label in one.labels)
            samples = ", ".join(f"`{sample}`" for sample in one.samples)
            text += f"| {samples} | {one.kind.value} | {labels} | {one.meaning} |\n"
    return text


def commands() -> str:
    """Return the commands of ``./fleet`` with their arguments and options."""
    text = _MARK.format("the commands in cli/") + "# Commands\n\n"
    text += (
        "`./fleet COMMAND --help` prints the same. A command exits with 0 if it succeeded, with 1 if it was refused or found a\n"
    )
    text += "fault, and with 2 if its arguments are wrong; the reason is one sentence on standard error.\n\n"
    text += "| command | purpose |\n| --- | --- |\n"
    for name, verb in VERBS.items():
        if not verb.hidden:
            text += f"| [`{name}`](#fleet-{name}) | {verb.help} |\n"
    built = cast("Any", get_command(app)).commands
    return text + "".join(_command(f"fleet {name}", built[name]) for name, verb in VERBS.items() if not verb.hidden)


def _command(path: str, command: Any) -> str:
    context = command.make_context(path, [], resilient_parsing=True)
    parameters = [one for one in command.params if not getattr(one, "hidden", False)]
    usage = " ".join(one.name.upper() for one in parameters if one.param_type_name == "argument")
    children = getattr(command, "commands", {})
    text = f"\n## {path}\n\n" if path.count(" ") == 1 else f"\n### {path}\n\n"
    text += inspect.cleandoc((command.help or "").partition("\f")[0]).replace("``", "`") + "\n\n"
    text += (
        f"```text\n./{path}{' ' + usage if usage else ''}{' COMMAND' if children else ''}{' [OPTIONS]' * (not children)}\n```\n"
    )
    rows = [(", ".join(f"`{name}`" for name in one.opts), one) for one in parameters if one.param_type_name == "option"]
    if rows := [(names, one) for names, one in rows if names != "`--help`"]:
        text += "\n| option | value | meaning |\n| --- | --- | --- |\n"
        for names, one in rows:
            value = "" if one.is_flag else f"`{one.display_type(context).strip('<>[]')}`".replace("|", ", ")
            text += f"| {names} | {value} | {' '.join((one.help or '').split()).replace('``', '`').replace('|', '&#124;')} |\n"
    return text + "".join(_command(f"{path} {name}", one) for name, one in children.items() if not one.hidden)


def codec(ending: str) -> str:
    """Return the code that protoc generates for Sparkplug payloads.

    Args:
        ending: ``_pb2.py`` for the code, or ``_pb2.pyi`` for its types.
    """
    source = ROOT / f"{CODEC}.proto"
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-m", "grpc_tools.protoc", f"-I{source.parent}", f"--python_out={folder}"]
        subprocess.run([*command, f"--pyi_out={folder}", source.name], check=True)
        return (Path(folder) / f"{source.stem}{ending}").read_text()


def api() -> str:
    """Return the routes of the HTTP API with their parameters and answers, from their declarations."""
    text = _MARK.format("the declarations in fleetpulse/web/") + "# HTTP API\n\n"
    text += f"""The server of `./fleet serve` answers below `{PREFIX}`. The API is read-only. `GET {PREFIX}/openapi.json`
returns this reference as a document of OpenAPI 3.1.

- Authentication: send a token of `./fleet access grant NAME --role {WebRole.API_READER}` as `Authorization: Bearer TOKEN`.
- Instants are epoch milliseconds, named `<name>_ms`. Of several values of a parameter, give one text with commas.
- An answer with a `version` is from facts in memory that are at most a few seconds old. Some of these answers have an
  `ETag`: a request with it as `If-None-Match` is answered with 304 until the facts change.
- A page has at most {MOST_ROWS:,} rows. Its `next` is the `after` of the next page. While the facts change, a device can move
  between pages.
- An error is `{{"error": {{"code": ..., "message": ...}}}}`. Programs compare the code. Every route can answer with
  {", ".join(map(str, ALWAYS))}.
"""
    return text + pages(operations())


FILES: Final = {
    "docs/reference/commands.md": commands,
    "docs/reference/tables.md": tables,
    "docs/reference/lifecycle.md": lifecycle,
    "docs/images/lifecycle.mmd": lifecycle_diagram,
    "docs/reference/policy.md": policy,
    "docs/reference/settings.md": settings,
    "docs/reference/dags.md": dags,
    "docs/reference/suites.md": suites,
    "docs/reference/metrics.md": metrics,
    "docs/reference/api.md": api,
    "docs/reference/message-v1.schema.json": schema,
    f"{CODEC}_pb2.py": partial(codec, "_pb2.py"),
    f"{CODEC}_pb2.pyi": partial(codec, "_pb2.pyi"),
    NOTICES.name: notices,
}


def main(arguments: list[str]) -> int:
    """Write the stale files, or list them with ``--check``; return the exit code."""
    stale: list[str] = []
    for name, generate in FILES.items():
        path, text = ROOT / name, generate()
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if "--check" not in arguments:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    if stale and "--check" in arguments:
        sys.stderr.write(f"stale: {', '.join(stale)}; run: .venv/bin/python -m cli.dev.docgen\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
