"""Services of a home: either one run of everything, or services that each run once."""

from typer.testing import CliRunner

from cli.app import app
from cli.commands.run.service import check_health
from cli.supervisor.processes import Run
from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.desired_state import STOPPED, set_desired
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import Service, in_use, page_held, page_holder, runs, served, services
from fleetpulse.io.system.process import write_status
from tests.support.refusals import refused


def test_services_share_a_home_and_each_runs_once(home: Home) -> None:
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
        pass  # both locks were released


def test_running_services_are_known_by_locks_and_not_by_stale_status_files(home: Home) -> None:
    write_status(home.run("bridge"), {"pid": 1, "state": "live"})
    assert not in_use(home)
    assert not runs(home, "bridge")
    with served(home, Service.BRIDGE):
        assert in_use(home)
        assert runs(home, "bridge") and runs(home, "bridge-north") and not runs(home, "landing")
    with home.locked("fleet up"):
        assert runs(home, "landing")


def test_the_http_server_runs_once_beside_a_run_or_services_and_does_not_use_the_home(home: Home) -> None:
    assert page_holder(home) is None
    with page_held(home, "fleet serve"):
        assert runs(home, "page") and not in_use(home)
        assert str(page_holder(home)).startswith("fleet serve (process ")
        with refused("page-runs-already", match="by fleet serve"), page_held(home, "another"):
            pass
        with home.locked("fleet up"):
            pass
    assert not runs(home, "page")
    with served(home, Service.PAGE):
        assert services(home) == (Service.PAGE,)
        assert not in_use(home), "it only reads"
        with refused("home-in-use"):
            home.locked("fleet up").__enter__()
    assert (home.path / "web").stat().st_mode & 0o777 == 0o700


def test_single_service_keeps_the_status_files_of_others(home: Home) -> None:
    write_status(home.run("landing"), {"pid": 1})
    with Run(home, alone=False):
        pass
    assert home.run("landing").exists()
    with Run(home):
        pass
    assert not home.run("landing").exists()


def test_health_check_reports_the_state_of_a_service(home: Home) -> None:
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
        with served(home, Service.PAGE):
            write_status(home.run("page"), {"pid": 1, "state": "running", "url": "http://127.0.0.1:8090"})
            assert check_health(home, Service.PAGE) == "the page: running"
        set_desired(home, STOPPED, "ann")
        assert check_health(home, Service.LIFECYCLE) == "the lifecycle job is stopped, as requested by ann"


def test_down_refuses_services_that_have_their_own_supervisor(home: Home) -> None:
    with served(home, Service.BROKER):
        done = CliRunner().invoke(app, ["down", "--home", str(home.path)])
    assert done.exit_code == 1
    assert isinstance(done.exception, FleetError)
    assert "systemctl stop fleetpulse.target" in str(done.exception)
