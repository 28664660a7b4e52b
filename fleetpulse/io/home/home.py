"""Home: folder of one installation, its record, and the locks on it and its state."""

import errno
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from fleetpulse.columnar.codec.versions import STORED_FORM
from fleetpulse.core.errors import FleetError
from fleetpulse.core.presence.identities import DeviceIdentity
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import BRIDGE, KAFKA
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.times import format_duration
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.checkpoints.generations import Generation, checkpoint_of, load_generations
from fleetpulse.io.system.file_systems import require_hard_links
from fleetpulse.io.system.fsync import atomic_write, is_disk_full
from fleetpulse.io.system.locks import folder_held, lock_holder, named_lock
from fleetpulse.io.system.secret_files import create_secret, write_secret

HOME_VERSION: Final = 1
_BY_VERSION_1: Final = "judged_by_version_1_ms"
SERVICES: Final = "services"  # name of the holder of a home's lock that services share
PUBLISHER: Final = "publisher"  # name of the process that publishes verdicts
PAGE: Final = "page"  # name of the HTTP server's process
KEY_GROUPS: Final = 8  # of a new home with up to two cores; fixed for a generation; suffices for about 100,000 devices
_NOT_IN_PATHS: Final = "%[]{}*?\\^|"  # Delta readers decode some of them, use some as patterns, and fail on others

_BY_OPERATORS: Final = ("settings.toml", "mapping.toml", "policy.toml", "tls", "spark.key")  # documented names
_INTERRUPTED: Final = ("settings.toml.new", "mapping.toml.new", "home.json.new")  # of a writer that was killed
_BEFORE_A_HOME: Final = frozenset({*_BY_OPERATORS, *_INTERRUPTED, "lost+found", ".DS_Store"})
_OWNER_ONLY: Final = 0o700  # messages of devices, logs and secrets are below
_ANOTHER: Final = "choose another with --home"


def _advice(error: OSError) -> str:
    """Return advice for an error of the operating system on a folder."""
    if is_disk_full(error):
        return f"free disk space, or {_ANOTHER}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"make it writable for this user, or {_ANOTHER}"
    return _ANOTHER


def _description(deployment: Deployment) -> str:
    return (
        f"an allowed lateness of {format_duration(deployment.allowed_lateness_ms)}, a clock lead of "
        f"{format_duration(deployment.max_clock_lead_ms)}, a backlog of {format_duration(deployment.max_backlog_ms)} and a "
        f"verdict jitter of {format_duration(deployment.verdict_jitter_ms)}"
    )


def _new_id() -> str:
    return secrets.token_hex(8)


def bridge_job(bridge: str) -> str:
    """Return the name of a bridge's process, which names its log and its status file."""
    return "bridge" if bridge == BRIDGE else f"bridge-{bridge}"


@dataclass(frozen=True, slots=True)
class Home:
    """Folder of one installation: paths, record and locks.

    Attributes:
        path: path of the folder.
    """

    path: Path

    @property
    def broker(self) -> Path:
        """Folder of the embedded broker: store, configuration and credentials."""
        return self.path / "broker"

    @property
    def segments(self) -> Path:
        """Folder of the first bridge's segments, see `segments_of`."""
        return self.segments_of(BRIDGE)

    def segments_of(self, bridge: str) -> Path:
        """Return the folder of a bridge's segments: those not yet landed, and the newest."""
        return self.path / "segments" / bridge

    def bridges(self) -> tuple[str, ...]:
        """Return the names of all bridges; `BRIDGE` comes first."""
        return (BRIDGE, *self.record().get("bridges", {}))

    def sites_of_bridges(self) -> Mapping[str, Sequence[str]]:
        """Return the sites of each bridge except the first; the bridge of Kafka has none."""
        return self.record().get("bridges", {})

    @property
    def commands(self) -> Path:
        """Folder of the spool of operators' commands."""
        return self.path / "commands"

    @property
    def lifecycle(self) -> Path:
        """Folder of the lifecycle job's checkpoints (one per generation) and their record."""
        return self.path / "checkpoints" / "lifecycle"

    @property
    def checkpoint(self) -> Path:
        """Checkpoint of the lifecycle job's current generation."""
        return checkpoint_of(self.lifecycle, load_generations(self.lifecycle).current)

    def stream_checkpoint(self, stream: StreamName) -> Path:
        """Return the checkpoint of a stream beside the lifecycle."""
        return self.path / "checkpoints" / stream

    @property
    def kafka_checkpoint(self) -> Path:
        """Folder of the offsets up to which Kafka's topics were read."""
        return self.path / "checkpoints" / "kafka"

    @property
    def publisher_position(self) -> Path:
        """Position file of the publisher of verdicts."""
        return self.path / "checkpoints" / "publisher.json"

    @property
    def logs(self) -> Path:
        """Folder of the log files, one per process."""
        return self.path / "logs"

    @property
    def broker_log(self) -> Path:
        """Log file of the embedded broker; rotated files have the time as a suffix."""
        return self.logs / "broker.log"

    @property
    def mapping(self) -> Path:
        """Mapping file for devices with other message formats; it may be absent."""
        return self.path / "mapping.toml"

    def session(self, name: str) -> str:
        """Return the client id of a session at the broker; create it on first use.

        A client id is secret: a client that connects with it takes over the session and its queued
        messages. It has 23 letters and digits, which every broker accepts (MQTT 3.1.1, section
        3.1.3.1).

        Args:
            name: name of the session.
        """
        path = self.broker / f"{name}.session"
        if not path.exists():
            from fleetpulse.io.ingest.segments import list_segments  # imports Arrow, which few users of a home need

            before = name == BRIDGE and any(list_segments(self.segments))  # the broker may hold messages for the old client id
            write_secret(path, f"fleetpulse-{BRIDGE}" if before else f"fleet{secrets.token_hex(9)}")
        return path.read_text()

    def canary_key(self) -> bytes:
        """Return the key that signs canaries of the home's bridges; create it on first use.

        The key is not a password: a subscriber that reads canaries could test guesses of a weak
        password without connecting to the broker.
        """
        return bytes.fromhex(create_secret(self.broker / "canary.key", secrets.token_hex(32)))

    def table(self, name: str) -> Path:
        """Return the folder of a Delta table."""
        return self.path / "tables" / name

    def run(self, name: str) -> Path:
        """Return the status file of a process."""
        return self.path / "run" / f"{name}.json"

    def exists(self) -> bool:
        """Return whether the home was created."""
        return (self.path / "home.json").exists()

    def record(self) -> dict[str, Any]:
        """Read the record of the home, which was written when it was created.

        Raises:
            FleetError: there is no home, it cannot be read, or its format version is not supported.
        """
        try:
            record = json.loads((self.path / "home.json").read_text())
        except FileNotFoundError:
            raise FleetError(
                f'there is no fleet in "{self.path}"; create one with: ./fleet up --home {self.path}, or choose another '
                f"with --home",
                code="home-missing",
            ) from None
        except NotADirectoryError:
            raise FleetError(
                f'a home must be a folder; "{self.path}" is a file, or is below a file; {_ANOTHER}', code="home-not-a-folder"
            ) from None
        except OSError as error:
            raise FleetError(
                f'the home "{self.path}" cannot be read ({error.strerror}); {_advice(error)}', code="home-unreadable"
            ) from None
        except ValueError as error:
            raise FleetError(
                f'"{self.path}/home.json" is damaged ({error}); restore it from a backup, or create another home',
                code="home-damaged",
            ) from None
        if not isinstance(record, dict) or "version" not in record:
            raise FleetError(f'"{self.path}/home.json" was not written by fleetpulse; {_ANOTHER}', code="home-foreign")
        if record["version"] != HOME_VERSION:
            raise FleetError(
                f'the home "{self.path}" has format version {record["version"]}; this fleetpulse supports {HOME_VERSION}; '
                f"use the fleetpulse that created it, or another home",
                code="home-version-unsupported",
            )
        return record

    def id(self) -> str | None:
        """Return the unique id of the home; None for an old home before `prepare`."""
        return self.record().get("id")

    def deployment(self) -> Deployment:
        """Return allowed lateness, clock lead, backlog and jitter, fixed at creation."""
        return Deployment(**self.record()["deployment"])

    def generation(self) -> Generation:
        """Return the lifecycle job's current generation.

        Raises:
            FleetError: the generation has a newer stored form than this version supports.
        """
        generations = load_generations(self.lifecycle)
        if found := generations.of(generations.current):
            if found.form > STORED_FORM:
                raise FleetError(
                    f'generation {found.number} of "{self.path}" writes stored form {found.form}; this fleetpulse supports '
                    f"stored forms up to {STORED_FORM}; use the fleetpulse that created the generation",
                    code="state-version-unsupported",
                )
            return found
        record = self.record()
        return Generation.first(int(record["key_groups"]), int(record["form"]))

    def key_groups(self) -> int:
        """Return the number of key groups of the current generation."""
        return self.generation().key_groups

    def identity(self) -> DeviceIdentity:
        """Return the setting ``identity`` of the home, fixed at creation."""
        return DeviceIdentity(self.record().get("identity", DeviceIdentity.ID))

    def judged_by_version_1_ms(self) -> int | None:
        """Return the ``received_at`` up to which fleetpulse version 1 has judged.

        Judgements of version 1 cannot be derived from bronze by the rules of this version.

        Returns:
            Instant, epoch milliseconds; None if version 1 did not create the home.
        """
        record = self.record()
        if "identity" in record:
            return record.get(_BY_VERSION_1)
        reached = judged_up_to(self.checkpoint)
        return reached[1] if reached else 0

    def upgrade(self) -> None:
        """Record the progress of version 1 if it created the home; run before judging."""
        if "identity" not in self.record():
            judged = {"identity": DeviceIdentity.ID.value, _BY_VERSION_1: self.judged_by_version_1_ms()}
            self._change_record(lambda record: record.update(judged))

    def prepare(
        self,
        deployment: Deployment | None,
        identity: DeviceIdentity | None = None,
        key_groups: int = KEY_GROUPS,
        files: Iterable[str] = (),
    ) -> None:
        """Create the home, or check that an existing one has the same deployment.

        Args:
            deployment: requested allowed lateness, clock lead, backlog and jitter. None uses those
                of the home, or the defaults for a new one.
            identity: requested setting ``identity``. None uses that of the home, or the default for
                a new one.
            key_groups: number of key groups of a new home. An existing one keeps its number, which
                `fleet state rescale` changes.
            files: paths of files that settings name, absolute or relative to the home. The folder of
                a new home may contain them, and anything in its subfolders that contain them.

        Raises:
            FleetError: the home has another deployment or identity, its folder cannot be used or
                written, or its path cannot contain tables.
        """
        if self.exists():
            made_for = self.deployment()
            if deployment is not None and deployment != made_for:
                raise FleetError(
                    f'the home "{self.path}" was created with {_description(made_for)}; got {_description(deployment)}; '
                    f"omit these settings, or choose another --home",
                    code="home-deployment-differs",
                )
            if identity is not None and identity is not self.identity():
                raise FleetError(
                    f'the home "{self.path}" was created with identity = "{self.identity()}"; got "{identity}"; omit the '
                    f"setting, or choose another --home",
                    code="home-identity-differs",
                )
            self.upgrade()
            if self.id() is None:  # the home was created before ids existed
                self._change_record(lambda record: record.setdefault("id", _new_id()))
        else:
            if invalid := [sign for sign in _NOT_IN_PATHS if sign in str(self.path.absolute())]:
                raise FleetError(
                    f"the path of a home must not contain any of {' '.join(_NOT_IN_PATHS)}; found {' '.join(invalid)} in "
                    f'"{self.path.absolute()}"; {_ANOTHER}',
                    code="home-path-invalid",
                )
            if foreign := self._foreign_files(files):
                raise FleetError(
                    f"a new home needs a folder that is new, or has only {', '.join(_BY_OPERATORS)} and files that settings "
                    f'name; "{self.path}" is not a home and contains {foreign}; {_ANOTHER}',
                    code="home-folder-not-empty",
                )
            record = {
                "version": HOME_VERSION,
                "id": _new_id(),
                "deployment": asdict(deployment or Deployment()),
                "identity": (identity or DeviceIdentity.ID).value,
                "key_groups": key_groups,
                "form": STORED_FORM,
                "recordings": {},
            }
            self._write_record(record)
        try:
            for folder in ("broker", "segments", f"segments/{BRIDGE}", "commands", "checkpoints", "logs", "run", "tables"):
                (self.path / folder).mkdir(_OWNER_ONLY, exist_ok=True)
            (self.path / "lock").touch()
            probe = self.path / f"lock.{os.getpid()}"
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise FleetError(
                f'the home "{self.path}" cannot be written ({error.strerror}); {_advice(error)}', code="home-unwritable"
            ) from None
        require_hard_links(self.path / "lock", probe)

    def divide(self, bridges: Mapping[str, Sequence[str]]) -> None:
        """Record the sites of each bridge except the first.

        Args:
            bridges: sites by bridge, see the setting ``bridges``.

        Raises:
            FleetError: a recorded bridge or site is missing in ``bridges``. The messages that the
                broker or Kafka keeps for it would be lost.
        """
        before: Mapping[str, Sequence[str]] = self.record().get("bridges", {})
        if KAFKA in before and KAFKA not in bridges:
            raise FleetError(
                f'the home "{self.path}" reads messages from Kafka, which keeps them for it; the setting kafka is missing; '
                f"restore the setting, or create another home",
                code="kafka-setting-missing",
            )
        for name, sites in before.items():
            if lost := set(sites) - set(bridges.get(name, ())):
                raise FleetError(
                    f'bridge "{name}" of the home "{self.path}" serves {", ".join(sorted(sites))}, and the broker may keep '
                    f"messages for it; the setting bridges lacks {', '.join(sorted(lost))}; add it to the bridge again, or "
                    f"create another home",
                    code="bridge-division-invalid",
                )
        now = {name: sorted(sites) for name, sites in bridges.items()}
        if now != before:
            self._change_record(lambda record: record.update(bridges=now))

    def _foreign_files(self, files: Iterable[str]) -> str:
        """Return names of foreign files in the folder, as text; empty if there are none.

        Args:
            files: paths of files that are not foreign, see `prepare`.
        """
        folder = self.path.absolute()
        named = [folder / Path(file).expanduser() for file in files]
        expected = _BEFORE_A_HOME | {path.relative_to(folder).parts[0] for path in named if folder in path.parents}
        try:
            names = sorted(path.name for path in self.path.iterdir() if path.name not in expected)
        except OSError:
            return ""  # there is no folder yet, or its creation reports the error
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def remember(self, recording: str, facts: dict[str, Any]) -> None:
        """Record the parameters of a replay, so that the same command can continue it.

        Args:
            recording: id of the recording.
            facts: parameters of the replay.
        """
        self._change_record(lambda record: record["recordings"].update({recording: facts}))

    def _change_record(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the record under a lock, so that no change of another process is lost."""
        try:
            with folder_held(self.path):
                record = self.record()
                change(record)
                self._write_record(record)
        except OSError as error:
            raise FleetError(
                f'the home "{self.path}" cannot be written ({error.strerror}); {_advice(error)}', code="home-unwritable"
            ) from None

    def _write_record(self, record: dict[str, Any]) -> None:
        try:
            self.path.mkdir(_OWNER_ONLY, parents=True, exist_ok=True)
            atomic_write(self.path / "home.json", json.dumps(record, indent=1))
        except OSError as error:
            raise FleetError(
                f'the home "{self.path}" cannot be written ({error.strerror}); {_advice(error)}', code="home-unwritable"
            ) from None

    @contextmanager
    def locked(self, by: str) -> Iterator[None]:
        """Hold the home's lock exclusively until the context exits or the process dies.

        Args:
            by: name of the holder, for error messages of other processes.

        Raises:
            FleetError: another run or a service holds the lock.
        """
        with named_lock(self.path / "lock", by, self.in_use_by):
            yield

    def in_use_by(self, other: str) -> FleetError:
        """Return the error that names the holder of the home's lock."""
        if other == SERVICES:
            advice = "stop them with their supervisor (systemctl stop fleetpulse.target, or docker compose stop)"
        else:
            advice = f"stop it with: ./fleet down --home {self.path}"
        return FleetError(f'the home "{self.path}" is in use by {other}; {advice}, or {_ANOTHER}', code="home-in-use")

    @contextmanager
    def state_held(self, by: str) -> Iterator[None]:
        """Hold the lock of the lifecycle job's checkpoints until the context exits.

        Only the holder may run the job on them, or change them.

        Args:
            by: name of the holder, for error messages of other processes.

        Raises:
            FleetError: another process holds the lock.
        """
        self.lifecycle.mkdir(parents=True, exist_ok=True)
        with named_lock(self.lifecycle / "lock", by, self._state_in_use_by):
            yield

    def require_state_free(self) -> None:
        """Check that `state_held` would succeed now, without holding the lock.

        Raises:
            FleetError: another process holds the lock; the message is that of `state_held`.
        """
        if (other := self.state_holder()) is not None:
            raise self._state_in_use_by(other.strip() or "another run")

    def _state_in_use_by(self, other: str) -> FleetError:
        return FleetError(
            f'the state of the home "{self.path}" is in use by {other}; if that is the job, stop only the job with: '
            f"./fleet stream stop --home {self.path}, and start it afterwards with: ./fleet stream start --home {self.path}",
            code="state-in-use",
        )

    def state_holder(self) -> str | None:
        """Return the name of the holder of the checkpoints' lock; None if it is free."""
        return lock_holder(self.lifecycle / "lock")

    def owner(self) -> int | None:
        """Return the id of the process that holds the home's lock; None if there is none.

        Services that share the lock are not reported.

        Raises:
            FleetError: the lock cannot be read.
        """
        try:
            text = lock_holder(self.path / "lock")
        except OSError as error:
            raise FleetError(
                f'the home "{self.path}" cannot be read ({error.strerror}); {_advice(error)}', code="home-unreadable"
            ) from None
        return int(text.rsplit(" ", 1)[-1].rstrip(")\n")) if text and "process" in text else None
