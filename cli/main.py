"""The command ``fleet``: reads arguments, calls a job or a report, shows it to people or as JSON."""

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from cli import (
    access,
    backtest,
    develop,
    devices,
    fetching,
    looking,
    maintaining,
    planning,
    policies,
    quality,
    rewind,
    service,
    state,
    stream,
)
from cli.amending import amend
from cli.availability import availability
from cli.chaos.command import chaos
from cli.drill import drill
from cli.jobs import jobs
from cli.options import DEFAULT_HOME, HomeOption
from fleetpulse import __version__
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.policy import Policy, parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.times import parse_duration_ms
from fleetpulse.io.address import parse_broker_url
from fleetpulse.io.home import Home

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Verdicts about devices that can be trusted.",
)
app.add_typer(jobs, name="job")
looking.register(app)
devices.register(app)
policies.register(app)
rewind.register(app)
access.register(app)
state.register(app)
stream.register(app)
maintaining.register(app)
quality.register(app)
planning.register(app)
service.register(app)
fetching.register(app)
backtest.register(app)
develop.register(app)
app.command("chaos")(chaos)
app.command("drill")(drill)
app.command("amend")(amend)
app.command("availability")(availability)

BrokerOption = Annotated[
    str | None, typer.Option("--broker", help="Another broker: mqtt://HOST:PORT, or mqtts:// for a secured line.")
]
LatenessOption = Annotated[str | None, typer.Option("--lateness", help="How late a message may come and be judged, such as 5m.")]
TimeoutOption = Annotated[str | None, typer.Option("--timeout", help="Silence after which a device is offline, such as 60m.")]
PolicyOption = Annotated[Path | None, typer.Option("--policy", help="A policy file (TOML).")]


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def deployment_of(home: Path, lateness: str | None) -> Deployment | None:
    """Return the deployment that was asked for, by option or settings; None where none was.

    Raises:
        FleetError: the settings have faults.
        Misuse: the lateness is below a second.
    """
    from fleetpulse.settings import load_settings  # it costs a tenth of a second, and the verbs that look need none

    lateness_ms = None if lateness is None else parse_duration_ms(lateness)
    if lateness_ms is not None and lateness_ms < 1_000:
        raise Misuse(f'--lateness must be at least 1s; got "{lateness}"')
    return load_settings(home).deployment(lateness_ms)


def policy_of(path: Path | None, timeout: str | None, otherwise: dict[str, object] | None = None) -> Policy:
    """Return the policy of a file, with the timeout that was asked for.

    Raises:
        FleetError: the file or the policy has faults.
    """
    content: dict[str, object] = dict(otherwise or {})
    if path is not None:
        content = read_toml(path)
    if timeout is not None:
        rules = content.get("rules")
        content["rules"] = {**(rules if isinstance(rules, dict) else {}), "timeout": timeout}
    return parse_policy(content)


def read_toml(path: Path) -> dict[str, object]:
    """Read a TOML file.

    Raises:
        FleetError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise FleetError(f'"{path}" cannot be read ({error.strerror}); name a TOML file that is there') from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FleetError(f'"{path}" is not TOML ({error})') from None


@app.command()
def replay(
    recording: Annotated[Path, typer.Argument(help="gzip or plain NDJSON.")],
    home: HomeOption = DEFAULT_HOME,
    timeout: TimeoutOption = None,
    lateness: LatenessOption = None,
    policy: PolicyOption = None,
    broker: BrokerOption = None,
) -> None:
    """Play a recording through the whole pipeline and judge it to the end."""
    from cli.replaying import replay as run

    address = parse_broker_url(broker) if broker else None
    run(Home(home), recording, policy_of(policy, timeout), deployment_of(home, lateness), address)
    looking.show_status(Home(home), json_lines=False)


@app.command()
def up(
    home: HomeOption = DEFAULT_HOME,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, max=1_000_000, help="Size of the simulated fleet (100).")
    ] = None,
    for_s: Annotated[float | None, typer.Option("--for", min=1, help="Stop by itself after so many seconds.")] = None,
    no_sim: Annotated[bool, typer.Option("--no-sim", help="Without simulated devices.")] = False,
    broker: BrokerOption = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port of the embedded broker; 0 takes a free one.")
    ] = 1883,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the simulated fleet (1).")] = None,
    timeout: TimeoutOption = None,
    lateness: LatenessOption = None,
    policy: PolicyOption = None,
    no_airflow: Annotated[bool, typer.Option("--no-airflow", help="Without Airflow, which needs 1 GB of memory.")] = False,
    airflow_port: Annotated[
        int, typer.Option("--airflow-port", min=0, max=65535, help="Port of Airflow's UI; 0 takes a free one.")
    ] = 8080,
    picture: Annotated[Path | None, typer.Option("--picture", hidden=True, help="Draw the last screen there, as SVG.")] = None,
) -> None:
    """Start everything and show it live; Ctrl-C stops everything in order."""
    from cli.running import Wanted
    from cli.running import up as run

    address = parse_broker_url(broker) if broker else None
    chosen = None
    if policy is not None or timeout is not None:
        chosen = policy_of(policy, timeout)
    wanted = Wanted(
        devices,
        seed,
        for_s,
        simulate=not no_sim,
        broker=address,
        port=port,
        policy=chosen,
        airflow_port=None if no_airflow else airflow_port,
        picture=picture,
    )
    run(Home(home), wanted, deployment_of(home, lateness))


@app.command()
def down(home: HomeOption = DEFAULT_HOME) -> None:
    """Stop the run that uses a home."""
    from cli.running import down as stop

    stop(Home(home))
