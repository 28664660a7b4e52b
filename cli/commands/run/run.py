"""``fleet replay``, ``fleet up`` and ``fleet down``: start and stop a run."""

from pathlib import Path
from typing import Annotated

import typer

from cli.common.options import DEFAULT_HOME, HomeOption
from cli.common.policy_files import deployment_of, policy_of
from fleetpulse.io.home.home import Home
from fleetpulse.io.mqtt.address import parse_broker_url

BrokerOption = Annotated[str | None, typer.Option("--broker", help="Use this broker: mqtt://HOST:PORT, or mqtts:// for TLS.")]
LatenessOption = Annotated[str | None, typer.Option("--lateness", help="Allowed lateness of messages, such as 5m.")]
TimeoutOption = Annotated[str | None, typer.Option("--timeout", help="Silence after which a device is offline, such as 60m.")]
PolicyOption = Annotated[Path | None, typer.Option("--policy", help="Policy file (TOML).")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("replay")(replay)
    app.command("up")(up)
    app.command("down")(down)


def replay(
    recording: Annotated[Path, typer.Argument(help="Recording: NDJSON, plain or gzip.")],
    home: HomeOption = DEFAULT_HOME,
    timeout: TimeoutOption = None,
    lateness: LatenessOption = None,
    policy: PolicyOption = None,
    broker: BrokerOption = None,
) -> None:
    """Play a recording through the whole pipeline and judge it to the end."""
    from cli.commands.inspect.status import show_status
    from cli.supervisor.replay import replay as run

    address = parse_broker_url(broker) if broker else None
    run(Home(home), recording, policy_of(policy, timeout), deployment_of(home, lateness), address)
    show_status(Home(home), json_lines=False)


def up(
    home: HomeOption = DEFAULT_HOME,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, max=1_000_000, help="Size of the simulated fleet; 100 by default.")
    ] = None,
    for_s: Annotated[float | None, typer.Option("--for", min=1, help="Stop after this many seconds.")] = None,
    no_sim: Annotated[bool, typer.Option("--no-sim", help="Do not simulate devices.")] = False,
    broker: BrokerOption = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port of the embedded broker; 0 for any free port.")
    ] = 1883,
    seed: Annotated[int | None, typer.Option("--seed", help="Random seed of the simulated fleet; 1 by default.")] = None,
    timeout: TimeoutOption = None,
    lateness: LatenessOption = None,
    policy: PolicyOption = None,
    no_airflow: Annotated[bool, typer.Option("--no-airflow", help="Do not run Airflow, which needs 1 GB of memory.")] = False,
    airflow_port: Annotated[
        int, typer.Option("--airflow-port", min=0, max=65535, help="Port of the Airflow UI; 0 for any free port.")
    ] = 8080,
    no_page: Annotated[bool, typer.Option("--no-page", help="Do not serve the operations page and the API.")] = False,
    page_port: Annotated[
        int, typer.Option("--page-port", min=0, max=65535, help="Port of the operations page; 0 for any free port.")
    ] = 8090,
    picture: Annotated[
        Path | None, typer.Option("--picture", hidden=True, help="Write the last screen to this SVG file.")
    ] = None,
) -> None:
    """Start the whole platform and show it live; Ctrl-C stops it in order."""
    from fleetpulse.io.system.process import block_imports

    block_imports("pandas")  # reading tables for the screen does not need it
    from cli.supervisor.up import UpOptions
    from cli.supervisor.up import up as run

    address = parse_broker_url(broker) if broker else None
    chosen = None
    if policy is not None or timeout is not None:
        chosen = policy_of(policy, timeout)
    options = UpOptions(
        devices,
        seed,
        for_s,
        simulate=not no_sim,
        broker=address,
        port=port,
        policy=chosen,
        airflow_port=None if no_airflow else airflow_port,
        picture=picture,
        page_port=None if no_page else page_port,
    )
    run(Home(home), options, deployment_of(home, lateness))


def down(home: HomeOption = DEFAULT_HOME) -> None:
    """Stop the run that uses a home."""
    from cli.supervisor.down import down as stop

    stop(Home(home))
