"""Settings of a deployment: environment first, the home's ``settings.toml`` second; read once, at the entry, and passed down.

Rule: all faults are reported at once, each with what was got.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, cast

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.decode import site_fault
from fleetpulse.core.presence.coverage import MAX_OURS
from fleetpulse.core.presence.identities import DeviceIdentity
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import BRIDGE, KAFKA
from fleetpulse.core.text import MAX_ID_BYTES
from fleetpulse.core.times import format_duration, parse_duration_ms

_BRIDGE_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_LONGEST_JITTER_MS: Final = 86_400_000
DEFAULT_SYNC: Final = "1s"
FOREVER: Final = "forever"
_DAY_MS: Final = 86_400_000
_HEAP: Final = re.compile(r"([1-9][0-9]{0,5})([mg])")
_LEAST_HEAP_MB: Final = 512
_BOUNDS: Final = {"greater_than_equal": ("ge", "at least"), "less_than_equal": ("le", "at most")}
_MOST_BRIDGES: Final = MAX_OURS - 2  # beside the first, and the one of Kafka


def _to_ms(value: Any) -> int:
    if not isinstance(value, str):
        raise ValueError(f'a duration is written as "5m"; got {value!r}')
    try:
        return parse_duration_ms(value)
    except FleetError as error:
        raise ValueError(str(error)) from None


def _to_ms_or_forever(value: Any) -> int | None:
    return None if value is None or value == FOREVER else _to_ms(value)


def _is_a_day(kept_ms: int | None) -> int | None:
    if kept_ms is not None and kept_ms < _DAY_MS:
        raise ValueError(f'what is kept is kept for a day at least, or "{FOREVER}"; write such as "90d"')
    return kept_ms


def _is_usable(value: str) -> str:
    if value == "hdfs":
        raise ValueError(
            "the HDFS-backed state store cannot be had: transformWithState, which keeps the devices' state and timers, needs "
            "column families, and Spark refuses any other provider than RocksDB (STORE_BACKEND_NOT_SUPPORTED_FOR_TWS); "
            'write "rocksdb", or leave it out; docs/state-store.md compares the two'
        )
    if value != "rocksdb":
        raise ValueError('the state store is "rocksdb"; write that, or leave it out')
    return value


def _is_sync(value: str) -> str:
    if value != "always":
        try:
            parse_duration_ms(value)
        except FleetError:
            raise ValueError('the broker syncs its store "always" or after a duration; write such as "1s"') from None
    return value


def _is_host(value: str) -> str:
    if len(value.encode()) > MAX_ID_BYTES or not value.isprintable() or any(mark in value for mark in "/+#"):
        raise ValueError(f'a host id has at most {MAX_ID_BYTES} printable bytes without / + #; write such as "fleetpulse"')
    return value


def _is_bounded(jitter_ms: int) -> int:
    if jitter_ms > _LONGEST_JITTER_MS:
        raise ValueError(
            f'verdicts are held back for {format_duration(_LONGEST_JITTER_MS)} at most; write a jitter such as "10m"'
        )
    return jitter_ms


def heap_mb(value: str) -> int:
    """Return how many megabytes (of 1,024 kB) a heap is, such as ``4g``; 0 where it is none."""
    found = _HEAP.fullmatch(value)
    return 0 if found is None else int(found[1]) * (1 if found[2] == "m" else 1_024)


def _is_heap(value: str) -> str:
    if heap_mb(value) < _LEAST_HEAP_MB:
        raise ValueError(f'a heap is {_LEAST_HEAP_MB}m at the least, in megabytes or gigabytes; write such as "4g"')
    return value


def _are_bridges(bridges: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    taken: dict[str, str] = {}
    if len(bridges) > _MOST_BRIDGES:
        raise ValueError(f"at most {_MOST_BRIDGES} further bridges share a fleet; got {len(bridges):,}; give each more sites")
    for name, sites in bridges.items():
        if not _BRIDGE_NAME.fullmatch(name) or name in (BRIDGE, KAFKA):
            raise ValueError(f'a bridge is named by 1 to 32 of a-z, 0-9 and -, and not "{BRIDGE}" or "{KAFKA}"; got {name!a}')
        if not sites:
            raise ValueError(f'bridge "{name}" takes no site; name one, or leave the bridge out')
        for site in sites:
            if fault := site_fault(site):
                raise ValueError(f'bridge "{name}": {fault}')
            if site in taken:
                raise ValueError(f'site "{site}" is taken by bridge "{taken[site]}" and by "{name}"; a site has one bridge')
            taken[site] = name
    return bridges


def _flat(value: Any) -> Any:
    """Let ``bootstrap.servers = "..."`` be written without quotes, as TOML reads a table of tables, and topics as a list."""
    if not isinstance(value, dict):
        return value
    flat: dict[str, Any] = {}
    for name, inner in cast("dict[str, Any]", value).items():
        if isinstance(inner, dict):
            flat |= {f"{name}.{below}": said for below, said in _flat(inner).items()}
        elif isinstance(inner, list):
            flat[name] = ",".join(map(str, cast("list[Any]", inner)))
        else:
            flat[name] = str(inner).lower() if isinstance(inner, bool) else str(inner)
    return flat


Milliseconds = Annotated[int, BeforeValidator(_to_ms)]
Kept = Annotated[int | None, BeforeValidator(_to_ms_or_forever), AfterValidator(_is_a_day)]


class Settings(BaseSettings):
    """What belongs to an installation; in the environment as ``FLEET_ALLOWED_LATENESS`` and so on, as durations.

    Attributes:
        allowed_lateness: how late a message may come and still be judged; fixed when a home is made.
        max_clock_lead: how far ahead a device's clock may be; beyond it, a signal counts for received_at. Fixed
            when a home is made.
        max_backlog: how old a signal may be; an older one counts for received_at. Fixed when a home is made.
        verdict_jitter: over how long the verdicts of one deadline are spread; fixed when a home is made.
        canary_interval: how often the bridge asks the broker whether we are listening; well below the lateness.
        reconnect_grace: how long after a return devices may still be on their way back.
        flood_limit: messages a second that a device may send in the long run, and 60 times as many at once, besides what
            it sent while nobody listened, for an hour at most; what is beyond goes to quarantine as ``flood``, but for the
            newest of each second. 0 for as many as it likes.
        sparkplug_host: the id under which we are a host application of Sparkplug B: its messages are taken, and our state is
            published as ``spBv1.0/STATE/<id>``. Empty for none.
        broker_sync: when the embedded broker syncs its store: a duration, which is what a loss of power may take of what it
            acknowledged, or ``always``.
        bridges: for a large fleet, further bridges by name, each with the sites whose messages it takes; ``bridge-1`` takes
            the rest, history and commands. In the file a table: ``[bridges]``, ``north = ["oslo", "turku"]``; in the
            environment JSON. A site keeps its bridge, and a bridge stays.
        identity: what identifies a device: ``id``, or ``site/id`` if ids repeat from site to site. Ids are then written with
            their site, such as ``oslo/pump-1``. Fixed when a home is made.
        kafka: topics of Kafka that are taken in as well: ``bootstrap.servers``, ``topics``, and options of Kafka's clients such
            as ``security.protocol``. In the file a table, ``[kafka]``; in the environment JSON. A home that takes from Kafka
            stays so.
        bridge_lease: how long one of several bridges may say nothing before the others go on without it: a gap is then open.
        cores: cores that the lifecycle job takes, and each verb that reads or moves its state. The job's first batch divides the
            state into as many partitions: ``fleet state repartition`` divides it anew.
        heap: memory of the JVM of each of them, such as ``4g``; their Python workers take theirs beside it (``fleet plan``).
        verdict_delay: how much later a verdict may come than the frontier allows it, while messages arrive as they are sent: at
            most a sixth of the allowed lateness, and at most 10 s, which is the default. A batch costs more than half a second of
            CPU however few messages it reads, so a shorter delay keeps the machine busier. A backlog is judged without delay.
        batch_every: the shortest time between the begins of two batches of the lifecycle job, 10 s at most; it holds for a
            backlog, too, which is then judged in batches of about 1,000,000 rows.
        state_store: where Spark keeps state: ``rocksdb``; asking for ``hdfs`` is refused with the reason.
        restarts: how often ``fleet up`` starts a process that died again by itself, within ten minutes. The lifecycle job is then
            left to who supervises it, where somebody does; otherwise the run ends.
        stale_after: for how long the lifecycle job may judge nothing of what waits, or no bridge may say a word, before ``fleet
            stream supervise`` calls it stale.
        keep_messages: how long ``fleet maintain`` keeps messages, counted back from the newest one (from now where that lies
            ahead); at least a day, or ``forever``, like each down to ``keep_quality``. Our own rows (registry, policies, gaps,
            commands) stay.
        keep_quarantine: how long it keeps what could not be decoded.
        keep_stream_health: how long the figures of batches are kept, by it and by the lifecycle job.
        keep_summaries: how long it keeps summaries among the judgements, but for each key group's newest.
        keep_late: how long it keeps judgements of single messages (late, clock, duplicate, after_decommission, unknown_device,
            refused), but for what ``fleet amend`` is to look at. Transitions stay for ever: a device's mode is its newest one.
        keep_device_snapshots: how long it keeps snapshots, one a day; the newest stays.
        keep_generations: how long it keeps the checkpoint of a generation that no longer runs, from when another took over; the
            newest of them stays, so that there is a way back.
        keep_logs: how long it keeps the log of a process that writes nothing, and what Airflow writes down of a run.
        keep_quality: how long it keeps what came of the looks at the data, in ``quality_results`` and ``quality_failures``.
        keep_quality_runs: of how many looks at the data the results and pages below ``quality`` are kept; with Airflow there are
            three an hour, and each reads all that are kept for the first page: 10 s of CPU with 200.
        keep_replaced: for how long it leaves files that others have replaced, and the log's old versions, to whoever is reading
            them; at least an hour.
        keep_judgement_versions: for how long the lifecycle job leaves a version of ``judgements`` in the log once a checkpoint
            holds all that it says; at least a minute; ``fleet maintain`` clears it after ``keep_replaced`` whatever stands here.
            Who reads the table version by version, as a stream of their own does, needs what they have not read: an hour of it
            makes each batch a tenth of a second longer.
    """

    model_config = SettingsConfigDict(env_prefix="FLEET_", frozen=True, extra="forbid", validate_default=True)

    allowed_lateness: Annotated[Milliseconds, Field(ge=1_000)] = "60s"  # pyright: ignore[reportAssignmentType]
    max_clock_lead: Annotated[Milliseconds, Field(ge=0)] = "5m"  # pyright: ignore[reportAssignmentType]
    max_backlog: Annotated[Milliseconds, Field(ge=60_000)] = "31d"  # pyright: ignore[reportAssignmentType]
    verdict_jitter: Annotated[Milliseconds, AfterValidator(_is_bounded)] = "0s"  # pyright: ignore[reportAssignmentType]
    canary_interval: Annotated[Milliseconds, Field(ge=500)] = "5s"  # pyright: ignore[reportAssignmentType]
    reconnect_grace: Annotated[Milliseconds, Field(ge=0)] = "2m"  # pyright: ignore[reportAssignmentType]
    flood_limit: Annotated[int, Field(ge=0, le=1_000_000)] = 100
    sparkplug_host: Annotated[str, AfterValidator(_is_host)] = ""
    broker_sync: Annotated[str, AfterValidator(_is_sync)] = DEFAULT_SYNC
    bridges: Annotated[dict[str, tuple[str, ...]], AfterValidator(_are_bridges)] = {}
    identity: DeviceIdentity = DeviceIdentity.ID
    kafka: Annotated[dict[str, str], BeforeValidator(_flat), Field(repr=False)] = {}
    bridge_lease: Annotated[Milliseconds, Field(ge=1_000)] = "15s"  # pyright: ignore[reportAssignmentType]
    cores: Annotated[int, Field(ge=1, le=1_024)] = 2
    heap: Annotated[str, AfterValidator(_is_heap)] = "1g"
    verdict_delay: Annotated[Milliseconds, Field(ge=0, le=10_000)] = "10s"  # pyright: ignore[reportAssignmentType]
    batch_every: Annotated[Milliseconds, Field(ge=200, le=10_000)] = "200ms"  # pyright: ignore[reportAssignmentType]
    state_store: Annotated[str, AfterValidator(_is_usable)] = "rocksdb"
    restarts: Annotated[int, Field(ge=0, le=1_000)] = 5
    stale_after: Annotated[Milliseconds, Field(ge=1_000)] = "10m"  # pyright: ignore[reportAssignmentType]
    keep_messages: Kept = "90d"  # pyright: ignore[reportAssignmentType]
    keep_quarantine: Kept = "90d"  # pyright: ignore[reportAssignmentType]
    keep_stream_health: Kept = "7d"  # pyright: ignore[reportAssignmentType]
    keep_summaries: Kept = "30d"  # pyright: ignore[reportAssignmentType]
    keep_late: Kept = FOREVER  # pyright: ignore[reportAssignmentType]
    keep_device_snapshots: Kept = "90d"  # pyright: ignore[reportAssignmentType]
    keep_generations: Kept = "30d"  # pyright: ignore[reportAssignmentType]
    keep_logs: Kept = "30d"  # pyright: ignore[reportAssignmentType]
    keep_quality: Kept = "90d"  # pyright: ignore[reportAssignmentType]
    keep_quality_runs: Annotated[int, Field(ge=1, le=1_000)] = 200
    keep_replaced: Annotated[Milliseconds, Field(ge=3_600_000)] = "1d"  # pyright: ignore[reportAssignmentType]
    keep_judgement_versions: Annotated[Milliseconds, Field(ge=60_000)] = "10m"  # pyright: ignore[reportAssignmentType]

    def all_bridges(self) -> dict[str, tuple[str, ...]]:
        """Return the sites of all further bridges; the one of Kafka has none."""
        return self.bridges | ({KAFKA: ()} if self.kafka else {})

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Let the environment win over the file, whose values are handed in."""
        return env_settings, init_settings

    def deployment(self, allowed_lateness_ms: int | None = None) -> Deployment | None:
        """Return the deployment that was asked for; None where nobody asked, so that a home keeps its own.

        Args:
            allowed_lateness_ms: from the command line; it wins.
        """
        asked = {"allowed_lateness", "max_clock_lead", "max_backlog", "verdict_jitter"} & self.model_fields_set
        if allowed_lateness_ms is None and not asked:
            return None
        lateness_ms = allowed_lateness_ms or self.allowed_lateness
        return Deployment(lateness_ms, self.max_clock_lead, self.verdict_jitter, self.max_backlog)

    def chosen_identity(self) -> DeviceIdentity | None:
        """Return the setting ``identity``; None if it is not set, so that a home keeps its own."""
        return self.identity if "identity" in self.model_fields_set else None


def _rule(fault: Mapping[str, Any]) -> str:
    """Say which rule was broken; bounds of durations as they are written, where pydantic says milliseconds."""
    field, bound = Settings.model_fields.get(str(fault["loc"][0])) if fault["loc"] else None, _BOUNDS.get(fault["type"])
    if field is None or bound is None or BeforeValidator(_to_ms) not in field.metadata:
        return str(fault["msg"])
    key, words = bound
    return f"a duration of {words} {format_duration(fault['ctx'][key])}"


def _got(fault: Mapping[str, Any]) -> str:
    return "" if fault["loc"][:1] == ("kafka",) else f"; got {fault['input']!r}"  # there are passwords among them


def load_settings(home: Path) -> Settings:
    """Return the settings of a home.

    Raises:
        FleetError: they have faults; all of them are named.
    """
    file = home / "settings.toml"
    try:
        content = tomllib.loads(file.read_text()) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise FleetError(f'"{file}" cannot be read as TOML ({error})', code="settings-unreadable") from None
    try:
        return Settings(**content)
    except SettingsError as error:
        raise FleetError(
            f"the settings have faults: {error}; in the environment bridges and kafka are JSON", code="settings-faulty"
        ) from None
    except ValidationError as error:
        faults = [f"  {'.'.join(map(str, one['loc']))}: {_rule(one)}{_got(one)}" for one in error.errors()]
        raise FleetError(
            f"the settings have faults (environment FLEET_..., {file}):\n" + "\n".join(faults), code="settings-faulty"
        ) from None
