"""Device lists for ``fleet state bootstrap``: from a file, or from the registry."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from fleetpulse.columnar.snapshot.bootstrap import CLASS_SINCE_FIELD, LIMIT_FIELDS, REGISTERED_SCHEMA, as_registered, require_once
from fleetpulse.core.errors import FleetError
from fleetpulse.core.policy import DEFAULT_CLASS
from fleetpulse.core.tables import DEVICES
from fleetpulse.core.times import parse_duration_ms
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables

_COLUMNS = ", ".join(REGISTERED_SCHEMA.names)
_REGISTERED_AT_FRONTIER = """
    WITH known AS (
        SELECT *, coalesce(nullif(device_class, ''), ?) AS its_class, (effective_from, received_at) AS entry
        FROM devices WHERE epoch_ms(effective_from) <= ?),
    standing AS (
        SELECT *, max(entry) FILTER (op = 'decommission') OVER its AS out,
            row_number() OVER (PARTITION BY device_id ORDER BY entry DESC) AS place
        FROM known WINDOW its AS (PARTITION BY device_id)),
    added AS (
        SELECT *, lag(its_rules) OVER (PARTITION BY device_id ORDER BY entry) AS rules_before
        FROM (SELECT *, (its_class, timeout_ms, death_grace_ms) AS its_rules FROM known WHERE op = 'add')),
    since AS (
        SELECT added.device_id, min(added.effective_from) FILTER (out IS NULL OR added.entry > out) AS registered_at,
            max(added.effective_from) FILTER (added.its_rules IS DISTINCT FROM rules_before) AS class_since,
            arg_max(nullif(added.gateway, ''), added.entry) AS its_gateway
        FROM added JOIN standing ON standing.device_id = added.device_id AND place = 1 GROUP BY added.device_id)
    SELECT device_id, site, device_class, its_gateway AS gateway, registered_at, timeout_ms, death_grace_ms, class_since
    FROM standing JOIN since USING (device_id) WHERE place = 1 AND op = 'add' ORDER BY device_id
"""


def registered_devices(home: Home, frontier_ms: int | None) -> pa.Table:
    """Return the devices that are registered at a frontier.

    Later entries of the registry are rows of bronze, so the job reads them itself. A device that
    returned to service counts as registered since its return. Its class and own limits are in
    effect since the entry that last changed them, as in the lifecycle job. Its gateway is the last
    one that an entry named.

    Args:
        home: home of the fleet.
        frontier_ms: frontier, epoch milliseconds; None if nothing was judged.

    Returns:
        Columns of `REGISTERED_SCHEMA`, `LIMIT_FIELDS` and `CLASS_SINCE_FIELD` of
        `columnar.snapshot.bootstrap`.

    Raises:
        FleetError: the registry has no devices.
    """
    found = tables.query(home, _REGISTERED_AT_FRONTIER, [DEFAULT_CLASS, frontier_ms or 0], tables=(DEVICES.name,))
    if not found:
        raise FleetError(
            f'the registry of "{home.path}" has no devices; add some with: ./fleet device add ID --home {home.path}',
            code="registry-empty",
        )
    return pa.Table.from_pylist(found, schema=pa.schema([*REGISTERED_SCHEMA, *LIMIT_FIELDS, CLASS_SINCE_FIELD]))


def read_devices(path: Path | None) -> pa.Table:
    """Read a CSV or Parquet file of devices; unknown columns are ignored.

    The columns ``device_class``, ``gateway``, ``timeout`` and ``death_grace`` (durations such as
    5m) are optional.

    Returns:
        Columns of `REGISTERED_SCHEMA` and `LIMIT_FIELDS` of `columnar.snapshot.bootstrap`.

    Raises:
        FleetError: the file is unreadable or of another format, or a column is missing,
            duplicated or of the wrong type.
    """
    assert path is not None, "the option was given"
    try:
        found = _parquet(path) if path.suffix == ".parquet" else _csv(path)
        for name in ("device_class", "gateway"):
            if name not in found.column_names:
                found = found.append_column(name, pa.nulls(len(found), pa.string()))
        read = as_registered(found)
        for field in LIMIT_FIELDS:
            read = read.append_column(field, _durations(found, field.name.removesuffix("_ms"), len(read)))
        return read
    except FileNotFoundError:
        raise FleetError(
            f'the file "{path}" does not exist; name a CSV or Parquet file of devices', code="list-missing"
        ) from None
    except FleetError as error:
        raise FleetError(f'"{path}" is not a valid list of devices: {error}', code="list-invalid") from None
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise FleetError(
            f'"{path}" is not a valid list of devices ({str(error).splitlines()[0][:200]}); use the columns {_COLUMNS}, '
            f"with registered_at like 2026-01-31T12:00:00Z",
            code="list-invalid",
        ) from None


def _durations(found: pa.Table, name: str, count: int) -> pa.Array:
    """Return a column of durations in milliseconds; null if a device has none."""
    if name not in found.column_names:
        return pa.nulls(count, pa.int64())
    texts = found[name].cast(pa.string()).to_pylist()
    return pa.array([parse_duration_ms(text) if text else None for text in texts], pa.int64())


def _parquet(path: Path) -> pa.Table:
    import pyarrow.parquet as pq

    require_once(pq.read_schema(path).names)  # clearer than PyArrow's error, which also lists its internal columns
    return pq.read_table(path)


def _csv(path: Path) -> pa.Table:
    from pyarrow import csv

    types: dict[str, Any] = {field.name: field.type for field in REGISTERED_SCHEMA}
    types |= {field.name.removesuffix("_ms"): pa.string() for field in LIMIT_FIELDS}
    options = csv.ConvertOptions(column_types=types, strings_can_be_null=True, null_values=[""])
    return csv.read_csv(path, convert_options=options)
