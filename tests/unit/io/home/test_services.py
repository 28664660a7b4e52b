"""A home is held by one run of everything, or by services, each of them once."""

from typer.testing import CliRunner

from cli.app import app
from cli.commands.run.service import check_health
from cli.supervisor.processes import Run
from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.desired_state import STOPPED, set_desired
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import Service, in_use, runs, served, services
from fleetpulse.io.system.process import write_status
from tests.support.refusals import refused


def test_services_share_a_home_and_each_is_there_once(home: Home) -> None:
    with served(home, Service.BRIDGE), served(home, Service.LANDING):
        assert services(home) == (Service.LANDING, Service.BRIDGE)
        assert home.owner() is None
        with refused("service-runs-already"), served(home, Service.BRIDGE):
            pass
    assert services(home) == ()


def test_a_run_of_everything_and_services_exclude_each_other(home: Home) -> None:
    with served(home, Service.BROKER), refused("home-in-use"):
        home.locked("fleet up").__enter__()
    with home.locked("fleet up"), refused("home-in-use"):
        served(home, Service.BROKER).__enter__()
    with served(home, Service.BROKER):
        pass  # each let go of it


def test_what_runs_is_known_by_locks_and_not_by_what_a_killed_process_left(home: Home) -> None:
    write_status(home.run("bridge"), {"pid": 1, "state": "live"})
    assert not in_use(home)
    assert not runs(home, "bridge")
    with served(home, Service.BRIDGE):
        assert in_use(home)
        assert runs(home, "bridge") and runs(home, "bridge-north") and not runs(home, "landing")
    with home.locked("fleet up"):
        assert runs(home, "landing")


def test_one_service_leaves_what_the_others_wrote(home: Home) -> None:
    write_status(home.run("landing"), {"pid": 1})
    with Run(home, alone=False):
        pass
    assert home.run("landing").exists()
    with Run(home):
        pass
    assert not home.run("landing").exists()


def test_a_check_says_how_a_part_is(home: Home) -> None:
    with refused("service-not-running"):
        check_health(home, Service.LANDING)
    with served(home, Service.LANDING), served(home, Service.LIFECYCLE):
        with refused("service-without-status"):
            check_health(home, Service.LANDING)
        write_status(home.run("landing"), {"pid": 1, "problem": None})
        assert check_health(home, Service.LANDING) == "the landing: running"
        write_status(home.run("landing"), {"pid": 1, "problem": "cannot write: the disk is full"})
        with refused("service-unwell"):
            check_health(home, Service.LANDING)
        set_desired(home, STOPPED, "ann")
        assert check_health(home, Service.LIFECYCLE) == "the lifecycle job is stopped, as requested by ann"


def test_down_leaves_services_to_who_supervises_them(home: Home) -> None:
    with served(home, Service.BROKER):
        done = CliRunner().invoke(app, ["down", "--home", str(home.path)])
    assert done.exit_code == 1
    assert isinstance(done.exception, FleetError)
    assert "systemctl stop fleetpulse.target" in str(done.exception)
