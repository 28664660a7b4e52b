"""Lists of devices that a run can begin with: a file that somebody brings, or the registry."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from fleetpulse.columnar.seeds import REGISTERED_SCHEMA
from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import DEVICES
from fleetpulse.io import delta
from fleetpulse.io.home import Home

_COLUMNS = ", ".join(REGISTERED_SCHEMA.names)
_NEWEST = """
    SELECT device_id, site, device_class, gateway, registered_at FROM (
        SELECT *, min(effective_from) FILTER (op = 'add') OVER (PARTITION BY device_id) AS registered_at,
            row_number() OVER (PARTITION BY device_id ORDER BY effective_from DESC, received_at DESC) AS place
        FROM devices WHERE epoch_ms(effective_from) <= ?
    ) WHERE place = 1 AND op = 'add' ORDER BY device_id
"""


def registered_devices(home: Home, frontier_ms: int | None) -> pa.Table:
    """Return the devices that the registry has at a frontier, columns of `REGISTERED_SCHEMA`; later entries come as rows."""
    found = delta.query(home, _NEWEST, [frontier_ms or 0], tables=(DEVICES.name,))
    if not found:
        raise FleetError(f'the registry of "{home.path}" has no device; add some: ./fleet device add ID --home {home.path}')
    return pa.Table.from_pylist(found, schema=REGISTERED_SCHEMA)


def read_devices(path: Path | None) -> pa.Table:
    """Read a CSV or Parquet file of devices: columns of `REGISTERED_SCHEMA`; ``device_class`` and ``gateway`` may be absent.

    Raises:
        FleetError: it cannot be read, is of another kind, or a column is absent.
    """
    assert path is not None, "the option was given"
    try:
        found = _parquet(path) if path.suffix == ".parquet" else _csv(path)
    except FileNotFoundError:
        raise FleetError(f'there is no file "{path}"; name a CSV or Parquet file of devices') from None
    except (OSError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise FleetError(
            f'"{path}" is no list of devices ({str(error).splitlines()[0][:200]}); it has the columns {_COLUMNS}, '
            f"registered_at as in 2026-01-31T12:00:00Z"
        ) from None
    for name in ("device_class", "gateway"):
        if name not in found.column_names:
            found = found.append_column(name, pa.nulls(len(found), pa.string()))
    return found


def _parquet(path: Path) -> pa.Table:
    import pyarrow.parquet as pq

    return pq.read_table(path)


def _csv(path: Path) -> pa.Table:
    from pyarrow import csv

    types: dict[str, Any] = {field.name: field.type for field in REGISTERED_SCHEMA}
    options = csv.ConvertOptions(column_types=types, strings_can_be_null=True, null_values=[""])
    return csv.read_csv(path, convert_options=options)
