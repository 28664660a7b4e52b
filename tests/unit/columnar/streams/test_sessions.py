"""Stored form of the sessions' state: a recorded sample of each version is read, and unknown versions are refused.

To record a sample of a new version: ``python -m tests.unit.columnar.streams.test_sessions``.
"""

import json

import pytest

from fleetpulse.columnar.codec.arrow import is_signal, signals_to_batch
from fleetpulse.columnar.streams.sessions import FORM, SessionGroup, stored_metadata
from fleetpulse.core.rows import Kind
from fleetpulse.paths import ROOT
from tests.support.histories.histories import START, row, signal, stamped_by_bridge
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
GOLDEN = ROOT / "tests" / "golden" / f"sessions-{FORM}.bin"
EXPECTED = GOLDEN.with_suffix(".json")


def _sample() -> SessionGroup:
    rows = stamped_by_bridge(
        [
            signal(0, "a", kind="birth", session="s-1", boot="b1", firmware="1.2", seq=7),
            signal(3, "a", seq=9),
            signal(3.5, "b", kind="birth", received_s=4),
            row(5.0005, "fleet/_/x/gap", op="open", from_s=4.2, sites=["north"]),
            row(6.0005, "fleet/_/y/gap", op="open", from_s=5.5),
            row(7.0005, "fleet/_/y/gap", op="close", until_s=6.9),
            row(8, "fleet/north/c/telemetry", gateway="g\u00e9"),
            row(50, "fleet/south/d/heartbeat"),
        ]
    )
    group = SessionGroup.begin(START)
    gaps = [one for one in rows if one.kind is Kind.GAP]
    group.fold(signals_to_batch([one for one in rows if is_signal(one)]), gaps, START + 50_000, 60_000)
    return group


def _plain(stored: bytes) -> dict[str, object]:
    group = SessionGroup.from_bytes(stored)
    schema = {field.name: str(field.type) for field in group.open.schema}
    return {"metadata": stored_metadata(stored), "schema": schema, "open": group.open.to_pylist()}


def test_the_recorded_form_reads_back_unchanged() -> None:
    stored = GOLDEN.read_bytes()
    expected = json.loads(EXPECTED.read_text())
    assert _plain(stored) == expected
    assert _plain(SessionGroup.from_bytes(stored).to_bytes()) == expected


def test_a_state_is_written_as_recorded() -> None:
    assert _plain(_sample().to_bytes()) == json.loads(EXPECTED.read_text()), "a change of the form needs a new version"


@pytest.mark.parametrize("version", [0, FORM + 1])
def test_a_state_of_an_unknown_version_is_refused_and_names_the_remedy(version: int) -> None:
    stored, current = GOLDEN.read_bytes(), f'"form":{FORM},'.encode()
    assert stored.count(current) == 1
    with refused("session-state-unknown", match=f"format version {version}; .* ./fleet stream rebuild sessions"):
        SessionGroup.from_bytes(stored.replace(current, f'"form":{version},'.encode()))


if __name__ == "__main__":
    GOLDEN.write_bytes(_sample().to_bytes())
    EXPECTED.write_text(json.dumps(_plain(GOLDEN.read_bytes()), sort_keys=True) + "\n")
