"""Settings of an installation, from the environment and ``settings.toml``.

The environment overrides the file. An entry point reads settings once and passes them down.

Rule: all faults are reported at once, each with the invalid value.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, cast

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.decode import site_fault
from fleetpulse.core.messages.text import MAX_ID_BYTES
from fleetpulse.core.messages.verdicts import DISCOVERY_PREFIX, prefix_fault
from fleetpulse.core.operations import broker_defaults
from fleetpulse.core.operations.secret_files import SECRET_NAME, exposed_secret
from fleetpulse.core.presence.coverage import MAX_OWN_BRIDGES
from fleetpulse.core.presence.identities import DeviceIdentity
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import BRIDGE, KAFKA
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.streams.options import StreamOptions
from fleetpulse.core.times import DAY_MS, HOUR_MS, format_duration, parse_duration_ms

_BRIDGE_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_LONGEST_JITTER_MS: Final = DAY_MS
FOREVER: Final = "forever"
_HEAP: Final = re.compile(r"([1-9][0-9]{0,5})([mg])")
_LEAST_HEAP_MB: Final = 512
_LEAST_STORE_MB: Final = 64
_MOST_STORE_MB: Final = 500 * 1_024  # the sum of all streams must be within the limit of the server
LOCAL: Final = "local"
_STANDALONE: Final = re.compile(r"spark://[^\s,/@:]+:[0-9]{1,5}(,[^\s,/@:]+:[0-9]{1,5})*")
# Without TLS, only on the loopback: the driver sends its token to the API server.
_KUBERNETES: Final = re.compile(r"k8s://(https://[A-Za-z0-9._-]+|http://127\.0\.0\.1)(:[0-9]{1,5})?")
_DNS_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_LEAST_PORT: Final = 1024
_MOST_FIRST_PORT: Final = 65_535 - 47
_DRIVER_HOST: Final = re.compile(r"[A-Za-z0-9._-]*")
_BOUNDS: Final = {"greater_than_equal": ("ge", "at least"), "less_than_equal": ("le", "at most")}
_MAX_BRIDGES: Final = MAX_OWN_BRIDGES - 2  # excludes the first bridge and the Kafka bridge


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
    if kept_ms is not None and kept_ms < DAY_MS:
        raise ValueError(f'a retention must be at least one day, or "{FOREVER}"; write a duration such as "90d"')
    return kept_ms


def _is_usable(value: str) -> str:
    if value == "hdfs":
        raise ValueError(
            "the HDFS-backed state store cannot be used: transformWithState, which keeps the devices' state and timers, needs "
            "column families, and Spark accepts only RocksDB for it (STORE_BACKEND_NOT_SUPPORTED_FOR_TWS); "
            'write "rocksdb", or remove the setting; docs/concepts/state-store.md compares the two'
        )
    if value != "rocksdb":
        raise ValueError('the state store must be "rocksdb"; write that, or remove the setting')
    return value


def _is_sync(value: str) -> str:
    if value != "always":
        try:
            parse_duration_ms(value)
        except FleetError:
            raise ValueError('broker_sync must be "always" or a duration; write a duration such as "1s"') from None
    return value


def _is_host(value: str) -> str:
    if len(value.encode()) > MAX_ID_BYTES or not value.isprintable() or any(mark in value for mark in "/+#"):
        raise ValueError(f'a host id has at most {MAX_ID_BYTES} printable bytes without / + #; write an id such as "fleetpulse"')
    return value


def _are_distinct(names: tuple[StreamName, ...]) -> tuple[StreamName, ...]:
    return tuple(sorted({*names}))


def _is_bounded(jitter_ms: int) -> int:
    if jitter_ms > _LONGEST_JITTER_MS:
        raise ValueError(
            f'verdicts can be delayed by at most {format_duration(_LONGEST_JITTER_MS)}; write a jitter such as "10m"'
        )
    return jitter_ms


def size_mb(value: str) -> int:
    """Parse a size such as ``4g``; return MiB, or 0 if it is invalid."""
    found = _HEAP.fullmatch(value)
    return 0 if found is None else int(found[1]) * (1 if found[2] == "m" else 1_024)


def _is_store(value: str) -> str:
    if not _LEAST_STORE_MB <= size_mb(value) <= _MOST_STORE_MB:
        raise ValueError(f'the store must have {_LEAST_STORE_MB}m to {_MOST_STORE_MB // 1_024}g; write a size such as "8g"')
    return value


def _is_heap(value: str) -> str:
    if size_mb(value) < _LEAST_HEAP_MB:
        raise ValueError(f'a heap must have at least {_LEAST_HEAP_MB}m, in megabytes or gigabytes; write a size such as "4g"')
    return value


def spark_master_of(value: str) -> str:
    """Return the address of a Spark master.

    Raises:
        ValueError: it is neither `LOCAL` nor a standalone cluster nor a Kubernetes.
    """
    if value == LOCAL or _STANDALONE.fullmatch(value) or _KUBERNETES.fullmatch(value):
        return value
    if value.startswith("local-cluster"):
        raise ValueError(
            "local-cluster serves Spark's own tests: its workers end with the process that started it; write "
            f'"{LOCAL}" and set cores, or start a standalone cluster and write its address, such as "spark://10.0.0.5:7077"'
        )
    raise ValueError(
        f'the master must be "{LOCAL}", whose number of cores is the setting cores, the address of a standalone cluster, or '
        'that of the API server of a Kubernetes; write an address such as "spark://10.0.0.5:7077" or '
        '"k8s://https://kubernetes.default.svc:443"'
    )


def _is_driver_host(value: str) -> str:
    if not _DRIVER_HOST.fullmatch(value):
        raise ValueError('the driver\'s host must be a name or an IPv4 address without a port; write one such as "10.0.0.7"')
    return value


def _is_dns_name(value: str) -> str:
    if value and not _DNS_NAME.fullmatch(value):
        raise ValueError("a name in Kubernetes has a-z, 0-9, - and .; write the name of a pod or a namespace")
    return value


def _is_first_port(value: int) -> int:
    if value and not _LEAST_PORT <= value <= _MOST_FIRST_PORT:
        raise ValueError(
            f"the first of 48 ports must be between {_LEAST_PORT} and {_MOST_FIRST_PORT}; write a port such as 20000, or 0 for "
            "any free ports"
        )
    return value


def _are_hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    for host in hosts:
        if not _DNS_NAME.fullmatch(host):
            raise ValueError(
                f"a host name of the HTTP server has a-z, 0-9, - and ., without a port; got {host!a}; write a name such as "
                '"fleet.example.com"'
            )
    return hosts


def _is_prefix(value: str) -> str:
    if fault := prefix_fault(value):
        raise ValueError(f'{fault}; write a prefix such as "{DISCOVERY_PREFIX}"')
    return value


def _are_bridges(bridges: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    bridge_by_site: dict[str, str] = {}
    if len(bridges) > _MAX_BRIDGES:
        raise ValueError(f"a fleet has at most {_MAX_BRIDGES} further bridges; got {len(bridges):,}; assign more sites to each")
    for name, sites in bridges.items():
        if not _BRIDGE_NAME.fullmatch(name) or name in (BRIDGE, KAFKA):
            raise ValueError(f'a bridge name has 1 to 32 of a-z, 0-9 and -, and is not "{BRIDGE}" or "{KAFKA}"; got {name!a}')
        if not sites:
            raise ValueError(f'bridge "{name}" has no sites; list at least one, or remove the bridge')
        for site in sites:
            if fault := site_fault(site):
                raise ValueError(f'bridge "{name}": {fault}')
            if site in bridge_by_site:
                raise ValueError(
                    f'site "{site}" is listed for bridges "{bridge_by_site[site]}" and "{name}"; a site has one bridge'
                )
            bridge_by_site[site] = name
    return bridges


def _flat(value: Any) -> Any:
    """Flatten tables to dotted names and lists to comma-separated text.

    So ``bootstrap.servers = "..."`` needs no quotes in TOML, and topics can be a list.
    """
    if not isinstance(value, dict):
        return value
    flat: dict[str, Any] = {}
    for name, inner in cast("dict[str, Any]", value).items():
        if isinstance(inner, dict):
            flat |= {f"{name}.{below}": text for below, text in _flat(inner).items()}
        elif isinstance(inner, list):
            flat[name] = ",".join(map(str, cast("list[Any]", inner)))
        else:
            flat[name] = str(inner).lower() if isinstance(inner, bool) else str(inner)
    return flat


Milliseconds = Annotated[int, BeforeValidator(_to_ms)]
Kept = Annotated[int | None, BeforeValidator(_to_ms_or_forever), AfterValidator(_is_a_day)]


class Settings(BaseSettings):
    """Settings of an installation; environment variables have the prefix ``FLEET_``.

    Attributes:
        allowed_lateness: allowed lateness: how late a message may arrive and still be judged. Fixed
            when a home is created.
        max_clock_lead: maximum lead of a device's clock; beyond it, a signal counts for
            received_at. Fixed when a home is created.
        max_backlog: maximum age of a signal; an older one counts for received_at. Fixed when a home
            is created.
        verdict_jitter: span over which the verdicts of one deadline are spread. Fixed when a home
            is created.
        canary_interval: interval of the canary messages with which the bridge tests its connection
            to the broker; it should be well below the allowed lateness.
        reconnect_grace: time after a coverage gap in which devices may still be reconnecting; their
            silence does not count.
        flood_limit: rate limit of a device in messages per second; 0 is no limit. A burst may have
            60 times as many, and in addition the messages of up to one hour in which no bridge
            listened. A message of a mapping with ``each`` counts once for each of its items.
            Messages beyond the limit go to quarantine as ``flood``, except the newest of
            each second. Of a flood, quarantine keeps some rows with the beginning of the payload,
            and the number of messages.
        flood_bytes: limit of the bytes of a device's payloads per second, with the same burst and
            the same effect; 0 is no limit. A single message may exceed it. Beyond it, a message
            above 1,024 bytes is refused even if it is the newest of its second.
        max_new_devices: number of devices per hour that a bridge may hear for the first time; 0 is no
            limit. Messages of further ones go to quarantine as ``new_device``. Devices that were
            heard before, or are registered, are not new. Topics of other formats than ``fleet/``
            are not limited.
        sparkplug_host: id of fleetpulse as a Sparkplug B host application; empty for none. With an
            id, Sparkplug messages are read and the host state is published as
            ``spBv1.0/STATE/<id>``.
        publish_verdicts: whether to publish the mode of each device at the broker, retained, on
            ``fleetpulse/state/<device>``. Without it, no process is started.
        discovery_prefix: prefix of the topics on which Home Assistant discovers these devices;
            empty for no discovery. Watchers of the embedded broker may read the default only.
        broker_sync: sync interval of the embedded broker's store, or ``always``. After a power
            failure, messages acknowledged within one interval can be lost.
        broker_store: maximum size of the messages that the embedded broker keeps for the bridge, such
            as ``8g``; at most half the disk space that it can get. If it is full, the broker
            acknowledges no message and closes the connection of the publisher, until the bridge has
            read. Retained messages have a quarter of the size in addition.
        broker_retained: maximum number of retained messages of the embedded broker. Each takes about
            1 KiB of its memory, with a long topic more. Verdicts are one or two for each device.
        broker_connections: maximum number of connections of the embedded broker.
        broker_certificate: PEM file of the embedded broker's certificate, followed by intermediate
            ones. With it, the broker listens with TLS only. A relative path, here and in the next
            settings, is relative to the home.
        broker_key: PEM file of the key of that certificate, unencrypted.
        broker_authority: PEM file of the authorities that signed that certificate, for
            fleetpulse's own connections; without it, they trust the authorities of the system.
        broker_client_authority: PEM file of the authorities that sign certificates of clients.
            With it, every client must present a certificate, which names its user
            (``fleet access grant --certificate``).
        broker_own_certificate: PEM file of the client certificate of fleetpulse's own connections,
            with the DNS name ``fleet``; required with ``broker_client_authority``.
        broker_own_key: PEM file of the key of that certificate, if it does not contain the key.
        serve_certificate: PEM file of the certificate of the HTTP server (``fleet serve``), followed by
            intermediate ones. With it, the server accepts TLS only. A relative path is relative to the
            home.
        serve_key: PEM file of the key of that certificate, unencrypted, if the first file does not
            contain the key.
        serve_hosts: further names by which clients address the HTTP server, for example the name at a
            proxy. Requests for other names than these, the listening address and the loopback are
            refused. In the file it is a list; in the environment it is JSON.
        bridges: further bridges of a large fleet by name, each with its sites. ``bridge-1``
            receives all other messages, history and commands. In the file it is a table:
            ``[bridges]``, ``north = ["oslo", "turku"]``; in the environment it is JSON. Bridges
            cannot be removed, and sites cannot be moved between them.
        identity: identity of a device: ``id``, or ``site/id`` if ids repeat from site to site. Ids
            then include the site, such as ``oslo/pump-1``. Fixed when a home is created.
        kafka: Kafka topics to read in addition: ``bootstrap.servers``, ``topics``, and options of
            Kafka clients such as ``security.protocol``. In the file it is a table, ``[kafka]``; in
            the environment it is JSON. It cannot be removed from a home that has it.
        bridge_lease: time without a sign of life after which one of several bridges counts as not
            listening. A coverage gap is then open, and judging continues without that bridge.
        cores: CPU cores of the lifecycle job, and of each verb that reads or moves its state. The
            first batch of the job creates as many state partitions; ``fleet state repartition``
            changes their number. A new home gets key groups for its cores; ``fleet state rescale``
            changes their number.
        heap: JVM heap of each of these, such as ``4g``. Their Python workers need memory in
            addition (``fleet plan``).
        spark_master: ``local`` for tasks in the process of each of these, or the address of a Spark
            standalone cluster, such as ``spark://10.0.0.5:7077``; several masters are separated by
            commas. ``k8s://https://host:port`` is the API server of a Kubernetes, which runs each
            executor in a pod. With a cluster, the home must be on a file system that all hosts share.
            The session of Kafka's topics is always local.
        driver_host: address of this machine at which executors of the cluster reach the job or
            verb; empty for the one from which the master is reached.
        executors: number of executors on the cluster, for the job and for each verb. Like the next
            two settings, it has no effect without a cluster.
        executor_cores: CPU cores of an executor. With a cluster, the cores of all executors replace
            the setting ``cores``.
        executor_memory: JVM heap of an executor, such as ``4g``. Its Python workers need memory in
            addition.
        executor_image: image of the executors' pods, which has the installation of the driver. This
            and the next four settings have an effect with a ``k8s://`` master only.
        executor_template: file with the template of these pods, which mounts the home. A relative
            path is relative to the home.
        executor_namespace: namespace of these pods.
        executor_overhead: memory of a pod beside the heap of its executor, for its Python workers and
            its share of the state.
        driver_pod: name of the driver's own pod in this namespace. When it is deleted, Kubernetes
            deletes the pods of its executors. Empty if the driver does not run in a pod.
        spark_key: file of the secret that all parts of the cluster share
            (``spark.authenticate.secret``), required with a cluster. A relative path is relative to
            the home. Pods of executors have the file at the driver's path.
        spark_port: first of 48 consecutive ports on which drivers and executors of a cluster listen,
            for firewalls: 16 for drivers, 16 for their blocks, 16 for blocks of executors. A host can
            then have up to 16 sessions, and a worker up to 16 executors. 0 for any free ports.
        verdict_delay: maximum delay of a verdict after the frontier allows it, while messages
            arrive live. It is limited to a sixth of the allowed lateness, and to 10 s (the
            default). A shorter delay uses more CPU: a batch takes more than half a CPU second,
            however few messages it reads. A backlog is judged without delay.
        batch_every: minimum interval between the starts of two batches of the lifecycle job, at
            most 10 s. It also applies to a backlog, which is judged in batches of about 1,000,000
            rows.
        state_store: state store of Spark: ``rocksdb``. ``hdfs`` is refused with the reason.
        restarts: maximum number of restarts of a failed process by ``fleet up`` within ten minutes.
            After that, the lifecycle job is left to its supervisor, if there is one; otherwise the
            run ends.
        stale_after: time after which ``fleet stream supervise`` calls the lifecycle job stale: it
            has judged no pending row, or no bridge has written anything.
        streams: streams beside the lifecycle to run: ``sessions`` (connections of devices), ``vitals``
            (metrics over windows) and ``commands`` (commands to devices, and their answers). Each costs
            CPU time and memory; none by default.
        streams_every: interval of the batches of each stream; a result is at most that much later.
        session_silence: covered time without a message after which the session of a device ends.
        command_timeout: time after which a command without an answer has timed out.
        keep_messages: retention of messages by ``fleet maintain``, counted back from the newest
            message, or from now if that is in the future. At least one day, or ``forever``, like
            all settings down to ``keep_quality``. Rows of the registry, policies, coverage gaps and
            commands are never removed. The same time holds for ``gateways``, except the newest
            older row of each gateway.
        keep_quarantine: retention of messages that could not be decoded.
        keep_stream_health: retention of batch metrics in ``stream_health``; the lifecycle job
            applies it, too.
        keep_summaries: retention of summaries in ``judgements``, except the newest of each key
            group.
        keep_late: retention of judgements about single messages (late, clock, duplicate,
            after_decommission, unknown_device, refused), except those that ``fleet amend`` has not
            processed. Transitions are kept forever: the newest transition of a device is its mode.
        keep_device_snapshots: retention of snapshots, one a day; the newest is always kept.
        keep_generations: retention of the checkpoint of a retired generation, counted from the
            switch; the newest of them is always kept, to make a rollback possible.
        keep_logs: retention of logs of processes that no longer write, and of Airflow's records of
            runs.
        keep_audit: retention of records of actions in ``audit``.
        keep_sessions: retention of sessions, counted from their end; the start of an open session is kept.
        keep_vitals: retention of windows in ``vitals`` and of ``vital_alarms``. It must exceed the
            longest ``for`` of a policy, or alarms of such bounds are not raised.
        keep_commands: retention of commands and their answers.
        keep_quality: retention of data quality results in ``quality_results`` and
            ``quality_failures``.
        keep_quality_runs: number of data quality runs whose results and pages are kept below
            ``quality``. With Airflow there are three an hour, and each reads all of them for the
            index page: 10 s of CPU for 200.
        keep_replaced: time for which replaced files and old versions of the log are kept for active
            readers; at least one hour.
        keep_judgement_versions: time for which the lifecycle job keeps a version of ``judgements``
            in the log after a checkpoint contains it; at least one minute. ``fleet maintain``
            removes it after ``keep_replaced`` in any case. A reader of single versions, such as
            another stream, needs the versions that it has not read. One hour of versions makes each
            batch a tenth of a second longer.
    """

    model_config = SettingsConfigDict(env_prefix="FLEET_", frozen=True, extra="forbid", validate_default=True)

    allowed_lateness: Annotated[Milliseconds, Field(ge=1_000)] = "60s"  # pyright: ignore[reportAssignmentType]
    max_clock_lead: Annotated[Milliseconds, Field(ge=0)] = "5m"  # pyright: ignore[reportAssignmentType]
    max_backlog: Annotated[Milliseconds, Field(ge=60_000)] = "31d"  # pyright: ignore[reportAssignmentType]
    verdict_jitter: Annotated[Milliseconds, AfterValidator(_is_bounded)] = "0s"  # pyright: ignore[reportAssignmentType]
    canary_interval: Annotated[Milliseconds, Field(ge=500)] = "5s"  # pyright: ignore[reportAssignmentType]
    reconnect_grace: Annotated[Milliseconds, Field(ge=0)] = "2m"  # pyright: ignore[reportAssignmentType]
    flood_limit: Annotated[int, Field(ge=0, le=1_000_000)] = 100
    flood_bytes: Annotated[int, Field(ge=0, le=1_000_000_000)] = 65_536
    max_new_devices: Annotated[int, Field(ge=0, le=100_000_000)] = 0
    sparkplug_host: Annotated[str, AfterValidator(_is_host)] = ""
    publish_verdicts: bool = False
    discovery_prefix: Annotated[str, AfterValidator(_is_prefix)] = DISCOVERY_PREFIX
    broker_sync: Annotated[str, AfterValidator(_is_sync)] = broker_defaults.SYNC
    broker_store: Annotated[str, AfterValidator(_is_store)] = f"{broker_defaults.STORE_GIB}g"
    broker_retained: Annotated[int, Field(ge=1_000, le=100_000_000)] = broker_defaults.RETAINED
    broker_connections: Annotated[int, Field(ge=10, le=1_000_000)] = broker_defaults.CONNECTIONS
    broker_certificate: str = ""
    broker_key: str = ""
    broker_authority: str = ""
    broker_client_authority: str = ""
    broker_own_certificate: str = ""
    broker_own_key: str = ""
    serve_certificate: str = ""
    serve_key: str = ""
    serve_hosts: Annotated[tuple[str, ...], AfterValidator(_are_hosts)] = ()
    bridges: Annotated[dict[str, tuple[str, ...]], AfterValidator(_are_bridges)] = {}
    identity: DeviceIdentity = DeviceIdentity.ID
    kafka: Annotated[dict[str, str], BeforeValidator(_flat), Field(repr=False)] = {}
    bridge_lease: Annotated[Milliseconds, Field(ge=1_000)] = "15s"  # pyright: ignore[reportAssignmentType]
    cores: Annotated[int, Field(ge=1, le=1_024)] = 2
    heap: Annotated[str, AfterValidator(_is_heap)] = "1g"
    spark_master: Annotated[str, AfterValidator(spark_master_of)] = LOCAL
    driver_host: Annotated[str, AfterValidator(_is_driver_host)] = ""
    executors: Annotated[int, Field(ge=1, le=1_024)] = 2
    executor_cores: Annotated[int, Field(ge=1, le=256)] = 1
    executor_memory: Annotated[str, AfterValidator(_is_heap)] = "1g"
    executor_image: str = ""
    executor_template: str = ""
    executor_namespace: Annotated[str, Field(min_length=1), AfterValidator(_is_dns_name)] = "default"
    executor_overhead: Annotated[str, AfterValidator(_is_heap)] = "2g"
    driver_pod: Annotated[str, AfterValidator(_is_dns_name)] = ""
    spark_key: str = ""
    spark_port: Annotated[int, AfterValidator(_is_first_port)] = 0
    verdict_delay: Annotated[Milliseconds, Field(ge=0, le=10_000)] = "10s"  # pyright: ignore[reportAssignmentType]
    batch_every: Annotated[Milliseconds, Field(ge=200, le=10_000)] = "200ms"  # pyright: ignore[reportAssignmentType]
    state_store: Annotated[str, AfterValidator(_is_usable)] = "rocksdb"
    streams: Annotated[tuple[StreamName, ...], AfterValidator(_are_distinct)] = ()
    streams_every: Annotated[Milliseconds, Field(ge=200, le=HOUR_MS)] = "30s"  # pyright: ignore[reportAssignmentType]
    session_silence: Annotated[Milliseconds, Field(ge=1_000)] = "60m"  # pyright: ignore[reportAssignmentType]
    command_timeout: Annotated[Milliseconds, Field(ge=1_000, le=DAY_MS)] = "5m"  # pyright: ignore[reportAssignmentType]
    restarts: Annotated[int, Field(ge=0, le=1_000)] = 5
    stale_after: Annotated[Milliseconds, Field(ge=1_000)] = "10m"  # pyright: ignore[reportAssignmentType]
    keep_messages: Kept = "90d"  # pyright: ignore[reportAssignmentType]
    keep_quarantine: Kept = "90d"  # pyright: ignore[reportAssignmentType]
    keep_stream_health: Kept = "7d"  # pyright: ignore[reportAssignmentType]
    keep_summaries: Kept = "30d"  # pyright: ignore[reportAssignmentType]
    keep_late: Kept = "90d"  # pyright: ignore[reportAssignmentType]
    keep_device_snapshots: Kept = "90d"  # pyright: ignore[reportAssignmentType]
    keep_generations: Kept = "30d"  # pyright: ignore[reportAssignmentType]
    keep_logs: Kept = "30d"  # pyright: ignore[reportAssignmentType]
    keep_audit: Kept = "365d"  # pyright: ignore[reportAssignmentType]
    keep_sessions: Kept = "365d"  # pyright: ignore[reportAssignmentType]
    keep_vitals: Kept = "90d"  # pyright: ignore[reportAssignmentType]
    keep_commands: Kept = "365d"  # pyright: ignore[reportAssignmentType]
    keep_quality: Kept = "90d"  # pyright: ignore[reportAssignmentType]
    keep_quality_runs: Annotated[int, Field(ge=1, le=1_000)] = 200
    keep_replaced: Annotated[Milliseconds, Field(ge=HOUR_MS)] = "1d"  # pyright: ignore[reportAssignmentType]
    keep_judgement_versions: Annotated[Milliseconds, Field(ge=60_000)] = "10m"  # pyright: ignore[reportAssignmentType]

    def all_bridges(self) -> dict[str, tuple[str, ...]]:
        """Return the sites of each further bridge; the bridge of Kafka has none."""
        return self.bridges | ({KAFKA: ()} if self.kafka else {})

    def files(self) -> list[str]:
        """Return the files that settings name; a relative path is relative to the home."""
        named = [self.broker_certificate, self.broker_key, self.broker_authority, self.broker_client_authority]
        named += [self.broker_own_certificate, self.broker_own_key, self.spark_key, self.executor_template]
        named += [self.serve_certificate, self.serve_key]
        return [file for file in named if file]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Give the environment precedence over the file, whose values are init arguments."""
        return env_settings, init_settings

    def deployment(self, allowed_lateness_ms: int | None = None) -> Deployment | None:
        """Return the configured deployment; None if no setting of it is set.

        A home then keeps its own deployment.

        Args:
            allowed_lateness_ms: allowed lateness from the command line; it takes precedence.
        """
        requested = {"allowed_lateness", "max_clock_lead", "max_backlog", "verdict_jitter"} & self.model_fields_set
        if allowed_lateness_ms is None and not requested:
            return None
        lateness_ms = allowed_lateness_ms or self.allowed_lateness
        return Deployment(lateness_ms, self.max_clock_lead, self.verdict_jitter, self.max_backlog)

    @property
    def task_cores(self) -> int:
        """Cores that run the tasks of a session: those of this machine, or of all executors on a cluster."""
        return self.cores if self.spark_master == LOCAL else self.executors * self.executor_cores

    def stream_options(self) -> StreamOptions:
        """Return the options of the streams beside the lifecycle."""
        return StreamOptions(self.streams, self.streams_every, self.session_silence, self.command_timeout)

    def chosen_identity(self) -> DeviceIdentity | None:
        """Return the setting ``identity``; None if it is not set: a home keeps its own."""
        return self.identity if "identity" in self.model_fields_set else None


def _rule(fault: Mapping[str, Any]) -> str:
    """Describe the violated rule; bounds of durations are durations, not milliseconds."""
    field, bound = Settings.model_fields.get(str(fault["loc"][0])) if fault["loc"] else None, _BOUNDS.get(fault["type"])
    if field is None or bound is None or BeforeValidator(_to_ms) not in field.metadata:
        return str(fault["msg"])
    key, relation = bound
    return f"a duration of {relation} {format_duration(fault['ctx'][key])}"


def _got(fault: Mapping[str, Any]) -> str:
    return "" if fault["loc"][:1] == ("kafka",) else f"; got {fault['input']!r}"  # options of Kafka include passwords


def _require_private_secrets(file: Path, content: Mapping[str, Any]) -> None:
    secret = next((name for name in _flat(content) if SECRET_NAME.search(name)), None)
    if secret is None:
        return
    exposed = exposed_secret(file, f"the secret {secret}", file.stat(), file.parent.stat(), os.geteuid())
    if exposed is not None:
        raise exposed


def load_settings(home: Path) -> Settings:
    """Read the settings of a home.

    Raises:
        FleetError: the settings are invalid; the message lists all faults. Or other users can read
            a secret in the file.
    """
    file = home / "settings.toml"
    try:
        content = tomllib.loads(file.read_text()) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise FleetError(f'cannot read "{file}" as TOML ({error}); correct the file', code="settings-unreadable") from None
    _require_private_secrets(file, content)
    try:
        return Settings(**content)
    except SettingsError as error:
        raise FleetError(
            f"invalid settings: {error}; write bridges, kafka, serve_hosts and streams as JSON in the environment",
            code="settings-faulty",
        ) from None
    except ValidationError as error:
        faults = [f"  {'.'.join(map(str, one['loc']))}: {_rule(one)}{_got(one)}" for one in error.errors()]
        raise FleetError(
            f"invalid settings (environment FLEET_..., {file}):\n" + "\n".join(faults), code="settings-faulty"
        ) from None
