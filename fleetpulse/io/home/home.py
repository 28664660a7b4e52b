"""A home: the folder in which one installation keeps everything, and the lock that lets one run use it."""

import errno
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from fleetpulse.columnar.codec.versions import STORED_FORM
from fleetpulse.core.errors import FleetError
from fleetpulse.core.presence.identities import DeviceIdentity
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import BRIDGE, KAFKA
from fleetpulse.core.times import format_duration
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.checkpoints.generations import Generation, checkpoint_of, load_generations
from fleetpulse.io.mqtt.address import write_secret
from fleetpulse.io.system.fsync import atomic_write, no_room
from fleetpulse.io.system.locks import folder_held, held, holder

HOME_VERSION: Final = 1
_BY_VERSION_1: Final = "judged_by_version_1_ms"
SERVICES: Final = "services"  # who hold a home together, each a part of it
KEY_GROUPS: Final = 8  # fixed for a generation: 8 groups carry about 100,000 devices
_NOT_IN_PATHS: Final = "%[]{}*?\\^|"  # Delta's readers take some of them for an encoding or a pattern, and some end on them

_BEFORE_A_HOME: Final = frozenset({"settings.toml", "mapping.toml", "home.json.new", "lost+found", ".DS_Store"})
_ANOTHER: Final = "name another with --home"


def _cure(error: OSError) -> str:
    """Return what to do about a folder that the system refuses."""
    if no_room(error):
        return f"free some space, or {_ANOTHER}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"make it yours to write, or {_ANOTHER}"
    return _ANOTHER


def _in_words(deployment: Deployment) -> str:
    return (
        f"a lateness of {format_duration(deployment.allowed_lateness_ms)}, a clock lead of "
        f"{format_duration(deployment.max_clock_lead_ms)}, a backlog of {format_duration(deployment.max_backlog_ms)} and a "
        f"jitter of {format_duration(deployment.verdict_jitter_ms)}"
    )


def _new_id() -> str:
    return secrets.token_hex(8)


def bridge_job(bridge: str) -> str:
    """Return the name of a bridge's process: of its log, and of its status file."""
    return "bridge" if bridge == BRIDGE else f"bridge-{bridge}"


@dataclass(frozen=True, slots=True)
class Home:
    """The paths of one installation.

    Attributes:
        path: its folder.
    """

    path: Path

    @property
    def broker(self) -> Path:
        """The embedded broker's store, configuration and credentials."""
        return self.path / "broker"

    @property
    def segments(self) -> Path:
        """Segments of the first bridge that have not been landed, and its newest."""
        return self.segments_of(BRIDGE)

    def segments_of(self, bridge: str) -> Path:
        """Segments of a bridge that have not been landed, and its newest."""
        return self.path / "segments" / bridge

    def bridges(self) -> tuple[str, ...]:
        """Return the names of the bridges, the first one first."""
        return (BRIDGE, *self.record().get("bridges", {}))

    def sites_of_bridges(self) -> Mapping[str, Sequence[str]]:
        """Return the sites of the further bridges, by name; none of that of Kafka."""
        return self.record().get("bridges", {})

    @property
    def commands(self) -> Path:
        """The spool of operators' commands."""
        return self.path / "commands"

    @property
    def lifecycle(self) -> Path:
        """The checkpoints of the lifecycle job, one a generation, and the record of these."""
        return self.path / "checkpoints" / "lifecycle"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of the lifecycle job's current generation."""
        return checkpoint_of(self.lifecycle, load_generations(self.lifecycle).current)

    @property
    def kafka_checkpoint(self) -> Path:
        """How far Kafka's topics were taken in."""
        return self.path / "checkpoints" / "kafka"

    @property
    def logs(self) -> Path:
        """One log a process."""
        return self.path / "logs"

    @property
    def mapping(self) -> Path:
        """The mapping file for devices that cannot speak our format; it may be absent."""
        return self.path / "mapping.toml"

    def session(self, name: str) -> str:
        """Return the client id of one of our sessions at the broker, made when it is first asked for.

        Whoever comes in with another's client id takes the session over, and with it what waits there: it is a secret. 23
        letters and digits, which every broker takes (MQTT 3.1.1, section 3.1.3.1).
        """
        path = self.broker / f"{name}.session"
        if not path.exists():
            from fleetpulse.io.ingest.segments import list_segments  # and with it Arrow, which few that know a home need

            before = name == BRIDGE and any(list_segments(self.segments))  # its session may hold messages under the old name
            write_secret(path, f"fleetpulse-{BRIDGE}" if before else f"fleet{secrets.token_hex(9)}")
        return path.read_text()

    def table(self, name: str) -> Path:
        """The folder of a Delta table."""
        return self.path / "tables" / name

    def run(self, name: str) -> Path:
        """The status file of a process."""
        return self.path / "run" / f"{name}.json"

    def exists(self) -> bool:
        """Whether somebody has begun to use it."""
        return (self.path / "home.json").exists()

    def record(self) -> dict[str, Any]:
        """Return what was written down when the home was made.

        Raises:
            FleetError: there is no home, or of a form that this version does not know.
        """
        try:
            record = json.loads((self.path / "home.json").read_text())
        except FileNotFoundError:
            raise FleetError(
                f'there is no fleet in "{self.path}"; begin one with: ./fleet up --home {self.path}, or name another with --home',
                code="home-missing",
            ) from None
        except NotADirectoryError:
            raise FleetError(
                f'a home is a folder; "{self.path}" is, or lies below, a file; {_ANOTHER}', code="home-not-a-folder"
            ) from None
        except OSError as error:
            raise FleetError(
                f'the home "{self.path}" cannot be read ({error.strerror}); {_cure(error)}', code="home-unreadable"
            ) from None
        except ValueError as error:
            raise FleetError(
                f'"{self.path}/home.json" is damaged ({error}); restore it, or begin another home', code="home-damaged"
            ) from None
        if not isinstance(record, dict) or "version" not in record:
            raise FleetError(f'"{self.path}/home.json" was not written by fleetpulse; {_ANOTHER}', code="home-foreign")
        if record["version"] != HOME_VERSION:
            raise FleetError(
                f'the home "{self.path}" has form {record["version"]}; this version knows {HOME_VERSION}; '
                f"use the fleetpulse that made it, or another home",
                code="home-version-unsupported",
            )
        return record

    def id(self) -> str | None:
        """Return what tells this home from all others; None in one from before there were ids, until it is prepared."""
        return self.record().get("id")

    def deployment(self) -> Deployment:
        """Return lateness, clock lead and jitter, as they were fixed when the home was made."""
        return Deployment(**self.record()["deployment"])

    def generation(self) -> Generation:
        """Return the lifecycle job's current generation."""
        generations = load_generations(self.lifecycle)
        if found := generations.of(generations.current):
            if found.form > STORED_FORM:
                raise FleetError(
                    f'generation {found.number} of "{self.path}" writes stored form {found.form}; this version knows forms up to '
                    f"{STORED_FORM}; use the fleetpulse that made it",
                    code="state-version-unsupported",
                )
            return found
        record = self.record()
        return Generation.first(int(record["key_groups"]), int(record["form"]))

    def key_groups(self) -> int:
        """Return the number of key groups of the current generation."""
        return self.generation().key_groups

    def identity(self) -> DeviceIdentity:
        """Return what identifies a device, as it was fixed when the home was made."""
        return DeviceIdentity(self.record().get("identity", DeviceIdentity.ID))

    def judged_by_version_1_ms(self) -> int | None:
        """Return up to which ``received_at`` version 1 has judged, epoch milliseconds; None where it made no part of the home.

        What version 1 judged does not follow from bronze by the rules of this version.
        """
        record = self.record()
        if "identity" in record:
            return record.get(_BY_VERSION_1)
        reached = judged_up_to(self.checkpoint)
        return reached[1] if reached else 0

    def upgrade(self) -> None:
        """Write down how far version 1 has judged, if it made the home, before this version judges anything."""
        if "identity" not in self.record():
            judged = {"identity": DeviceIdentity.ID.value, _BY_VERSION_1: self.judged_by_version_1_ms()}
            self._change_record(lambda record: record.update(judged))

    def prepare(self, deployment: Deployment | None, identity: DeviceIdentity | None = None) -> None:
        """Make the home, or check that it was made for the same deployment.

        Args:
            deployment: lateness, clock lead and jitter that were asked for; None takes what is there, or the defaults.
            identity: what identifies a device; likewise.

        Raises:
            FleetError: it is another deployment's, or cannot be written, or tables cannot lie in a folder of that name.
        """
        if self.exists():
            made_for = self.deployment()
            if deployment is not None and deployment != made_for:
                raise FleetError(
                    f'the home "{self.path}" judges with {_in_words(made_for)}; got {_in_words(deployment)}; '
                    f"leave them out, or name another --home",
                    code="home-deployment-differs",
                )
            if identity is not None and identity is not self.identity():
                raise FleetError(
                    f'the home "{self.path}" identifies devices by {self.identity()}; got identity = "{identity}"; leave the '
                    f"setting out, or name another --home",
                    code="home-identity-differs",
                )
            self.upgrade()
            if self.id() is None:  # it is from before there were ids
                self._change_record(lambda record: record.setdefault("id", _new_id()))
        else:
            if odd := [sign for sign in _NOT_IN_PATHS if sign in str(self.path.absolute())]:
                raise FleetError(
                    f'a home\'s path has none of {" ".join(_NOT_IN_PATHS)}; got {" ".join(odd)} in "{self.path.absolute()}"; '
                    f"{_ANOTHER}",
                    code="home-path-invalid",
                )
            if strange := self._strangers():
                raise FleetError(
                    f'a home begins in a new or an empty folder; "{self.path}" is no home and holds {strange}; {_ANOTHER}',
                    code="home-folder-not-empty",
                )
            record = {
                "version": HOME_VERSION,
                "id": _new_id(),
                "deployment": asdict(deployment or Deployment()),
                "identity": (identity or DeviceIdentity.ID).value,
                "key_groups": KEY_GROUPS,
                "form": STORED_FORM,
                "recordings": {},
            }
            self._write_record(record)
        try:
            for folder in (self.broker, self.segments, self.commands, self.logs, self.path / "run", self.path / "tables"):
                folder.mkdir(parents=True, exist_ok=True)
            (self.path / "lock").touch()
            probe = self.path / f"lock.{os.getpid()}"
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise FleetError(
                f'the home "{self.path}" cannot be written ({error.strerror}); {_cure(error)}', code="home-unwritable"
            ) from None
        try:
            os.link(self.path / "lock", probe)
            probe.unlink()
        except OSError as error:
            raise FleetError(
                f'the file system of "{self.path}" has no hard links ({error.strerror}), by which a segment gets a number that '
                f"no other has; {_ANOTHER}, on a local disk",
                code="hard-links-missing",
            ) from None

    def divide(self, bridges: Mapping[str, Sequence[str]]) -> None:
        """Write down which further bridge takes which sites.

        Args:
            bridges: sites by bridge, see the setting ``bridges``.

        Raises:
            FleetError: a bridge or a site is missing that was there before: what the broker keeps for it would be lost.
        """
        before: Mapping[str, Sequence[str]] = self.record().get("bridges", {})
        if KAFKA in before and KAFKA not in bridges:
            raise FleetError(
                f'the home "{self.path}" takes messages from Kafka, and Kafka keeps what comes for it; got no setting kafka; '
                f"leave that, or begin another home",
                code="kafka-setting-missing",
            )
        for name, sites in before.items():
            if lost := set(sites) - set(bridges.get(name, ())):
                raise FleetError(
                    f'bridge "{name}" of the home "{self.path}" takes {", ".join(sorted(sites))}, and the broker may keep '
                    f"messages for it; got it without {', '.join(sorted(lost))}; leave that with it, or begin another home",
                    code="bridge-division-invalid",
                )
        now = {name: sorted(sites) for name, sites in bridges.items()}
        if now != before:
            self._change_record(lambda record: record.update(bridges=now))

    def _strangers(self) -> str:
        """Name some of what lies in a folder that is no home; empty where a home may begin."""
        try:
            names = sorted(path.name for path in self.path.iterdir() if path.name not in _BEFORE_A_HOME)
        except OSError:
            return ""  # there is none yet, or making it says why not
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def remember(self, recording: str, facts: dict[str, Any]) -> None:
        """Write down what a recording is played with, so that the same command can go on with it."""
        self._change_record(lambda record: record["recordings"].update({recording: facts}))

    def _change_record(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change what is written down, and lose nothing that another process writes down meanwhile."""
        try:
            with folder_held(self.path):
                record = self.record()
                change(record)
                self._write_record(record)
        except OSError as error:
            raise FleetError(
                f'the home "{self.path}" cannot be written ({error.strerror}); {_cure(error)}', code="home-unwritable"
            ) from None

    def _write_record(self, record: dict[str, Any]) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            atomic_write(self.path / "home.json", json.dumps(record, indent=1))
        except OSError as error:
            raise FleetError(
                f'the home "{self.path}" cannot be written ({error.strerror}); {_cure(error)}', code="home-unwritable"
            ) from None

    @contextmanager
    def locked(self, by: str) -> Iterator[None]:
        """Hold the home for one run; the operating system lets go of it whatever way the process dies.

        Raises:
            FleetError: another run holds it.
        """
        with held(self.path / "lock", by, self.in_use_by):
            yield

    def in_use_by(self, other: str) -> FleetError:
        """Return the error that says who holds the home."""
        if other == SERVICES:
            cure = "stop them where they are supervised (systemctl stop fleetpulse.target, or docker compose stop)"
        else:
            cure = f"stop it with: ./fleet down --home {self.path}"
        return FleetError(f'the home "{self.path}" is in use by {other}; {cure}, or {_ANOTHER}', code="home-in-use")

    @contextmanager
    def state_held(self, by: str) -> Iterator[None]:
        """Hold the lifecycle job's checkpoints: one at a time runs on them, or changes them.

        Raises:
            FleetError: another does.
        """
        self.lifecycle.mkdir(parents=True, exist_ok=True)
        with held(self.lifecycle / "lock", by, self._state_in_use_by):
            yield

    def require_state_free(self) -> None:
        """See that `state_held` would be let in now, and hold nothing.

        Raises:
            FleetError: somebody holds the checkpoints, in the words of `state_held`.
        """
        if (other := self.state_holder()) is not None:
            raise self._state_in_use_by(other.strip() or "another run")

    def _state_in_use_by(self, other: str) -> FleetError:
        return FleetError(
            f'the state of the home "{self.path}" is in use by {other}; where that is the job, stop it alone with: '
            f"./fleet stream stop --home {self.path}, and start it afterwards with: ./fleet stream start --home {self.path}",
            code="state-in-use",
        )

    def state_holder(self) -> str | None:
        """Say who holds the lifecycle job's checkpoints; None where nobody does."""
        return holder(self.lifecycle / "lock")

    def owner(self) -> int | None:
        """Return the process that holds the home; None where nobody does."""
        try:
            text = holder(self.path / "lock")
        except OSError as error:
            raise FleetError(
                f'the home "{self.path}" cannot be read ({error.strerror}); {_cure(error)}', code="home-unreadable"
            ) from None
        return int(text.rsplit(" ", 1)[-1].rstrip(")\n")) if text and "process" in text else None
