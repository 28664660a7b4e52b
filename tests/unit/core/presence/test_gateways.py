"""Deaths and returns of gateways: each is found once, also when landing restarts."""

import json
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.core.presence.gateways import Gateway, Gateways
from fleetpulse.core.rows import BRIDGE, GatewayEvent, Row
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest.segments import SegmentRow, rows_table, write_segment
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.bronze import read_bronze
from streaming.landing import landing as landing_module
from streaming.landing.landing import Landing
from tests.support.histories.histories import START, positioned, row, signal

pytestmark = pytest.mark.unit
DEATH, RETURN = GatewayEvent.DEATH, GatewayEvent.RETURN


def events(*rows: Row) -> list[GatewayEvent | None]:
    return [one.gateway_event for one in positioned(rows)]


def death(at_s: float, **more: Any) -> Row:
    return row(at_s, "g/death", gateway="g", **more)


def from_g(at_s: float, **more: Any) -> Row:
    return signal(at_s, "g", **more)


def test_a_gateway_returns_once_with_its_first_signal_after_its_death() -> None:
    assert events(signal(1, "g"), death(2), signal(3, "g"), signal(4, "g")) == [None, DEATH, RETURN, None]
    assert events(death(2), death(3), signal(4, "d"), signal(5, "g")) == [DEATH, DEATH, None, RETURN]
    assert events(row(2, "g/death"), signal(3, "g")) == [None, None], "no device is behind it"


@pytest.mark.parametrize("device_clock_s", [-1024 * 604_800, -3_600, -1, 0, 3_600])
def test_a_gateways_own_signal_is_its_return_with_any_clock(device_clock_s: float) -> None:
    assert events(death(2), signal(3 + device_clock_s, "g", received_s=3)) == [DEATH, RETURN]


def test_a_signal_through_another_gateway_is_a_return_if_sent_after_the_death() -> None:
    assert events(death(10), signal(9, "g", received_s=12, gateway="h"), signal(11, "g", received_s=13, gateway="h")) == [
        DEATH,
        None,
        RETURN,
    ]


@pytest.mark.parametrize("name", ["session", "boot"])
def test_a_will_of_an_older_session_is_no_death(name: str) -> None:
    named = [from_g(at, gateway="g", **{name: value}) for at, value in ((1, "1"), (2, "2"))]
    assert events(*named, death(3, **{name: "1"}), death(4, **{name: "2"}), death(5)) == [None, None, None, DEATH, DEATH]
    unnamed = [from_g(at, **{name: value}) for at, value in ((1, "1"), (2, "2"))]
    assert events(*unnamed, death(3, **{name: "1"})) == [None, None, DEATH], "no signal names it as a gateway"


def test_a_late_signal_does_not_change_the_newest_session() -> None:
    late = signal(10, "g", received_s=200, gateway="g", session="1")
    assert events(signal(100, "g", gateway="g", session="2"), late, death(201, session="2")) == [None, None, DEATH]


def born(ts_s: float, seq: int | None, session: str, received_s: float | None = None, **more: Any) -> Row:
    return signal(
        ts_s, "g", "birth", received_s=received_s, **{"gateway": "g", "boot": "p", "seq": seq, "session": session, **more}
    )


def test_a_birth_that_is_delivered_again_does_not_set_the_newest_session_back() -> None:
    again = born(1, 1, "1", received_s=12)
    assert events(born(1, 1, "1"), born(10, 7, "2"), again, death(13, session="2")) == [None, None, None, DEATH]
    assert events(born(1, 1, "1"), born(10, 7, "2"), again, death(13, session="1")) == [None, None, None, None]
    assert events(death(0), born(10, 7, "2"), again, death(13, session="1")) == [DEATH, RETURN, None, None]


@pytest.mark.parametrize(
    "second",
    [
        born(12, 1, "2"),  # its counter begins anew with each connection
        born(1, 1, "2", received_s=12, boot="q"),
        born(1, 3, "2", received_s=12),
        born(1, None, "2", received_s=12),
        row(12, "fleet/north/g/birth", gateway="g", boot="p", seq=1, session="2", ts_s=1),
    ],
)
def test_a_birth_that_was_not_sent_earlier_names_the_newest_session(second: Row) -> None:
    assert events(born(10, 2, "1"), second, death(13, session="1"), death(14, session="2")) == [None, None, None, DEATH]


def test_without_a_valid_event_time_the_counter_alone_decides() -> None:
    again = row(12, "g/birth", gateway="g", boot="p", seq=1, session="1", ts="noon")
    assert events(born(10, 7, "2"), again, death(13, session="1"), death(14, session="2")) == [None, None, None, DEATH]


@pytest.mark.parametrize("name", ["session", "boot"])
def test_a_signal_of_a_known_gateway_sets_its_session_without_a_gateway_field(name: str) -> None:
    rows = [from_g(1, gateway="g", **{name: "1"}), from_g(2, **{name: "2"}), death(3, **{name: "1"}), death(4, **{name: "2"})]
    assert events(*rows) == [None, None, None, DEATH]


def test_a_live_gateway_without_a_session_is_not_recorded() -> None:
    gateways = Gateways(60_000)
    for one in (signal(1, "g", gateway="g"), signal(2, "d", gateway="g"), death(3), signal(4, "g", gateway="g")):
        gateways.read(one)
    assert gateways.known == {}


# --- landing


def message(at_s: float, device: str, kind: str, **payload: Any) -> SegmentRow:
    return SegmentRow(START + int(at_s * 1000), f"fleet/oslo/{device}/{kind}", json.dumps(payload).encode(), "mqtt")


STORY = [
    [message(0, "d", "heartbeat", gateway="g"), message(1, "g", "birth", gateway="g", session="1")],
    [message(2, "g", "birth", gateway="g", session="2"), message(2.5, "g", "death", gateway="g", session="1")],
    [message(3, "g", "death", gateway="g", session="2"), message(3.001, "d", "heartbeat", gateway="g")],
    [message(4, "g", "heartbeat", session="3"), message(5, "g", "heartbeat"), message(6, "h", "death", gateway="h")],
]
EXPECTED = [(3.0, "g", "death"), (4.0, "g", "return"), (6.0, "h", "death")]
KNOWN = {"g": Gateway("g", None, "3", None, "oslo", None, START + 4_000), "h": Gateway("h", START + 6_000)}


def write(home: Home, number: int, rows: list[SegmentRow]) -> None:
    write_segment(home.segments_of(BRIDGE), number, rows_table(rows), bridge=BRIDGE, last_canary_ms=None)


def found(home: Home) -> list[tuple[float, str, str]]:
    sql = """SELECT epoch_ms(received_at) AS at, device_id, gateway_event AS event FROM messages
             WHERE gateway_event IS NOT NULL ORDER BY received_at"""
    return [((one["at"] - START) / 1000, one["device_id"], one["event"]) for one in tables.query(home, sql, tables=["messages"])]


def listed(home: Home) -> list[str]:
    sql = "SELECT device_id || ' ' || event AS entry FROM gateways ORDER BY received_at"
    return [one["entry"] for one in tables.query(home, sql, tables=["gateways"])]


LISTED = ["g session", "g session", "g death", "g return", "h death"]


def test_gateway_events_do_not_depend_on_restarts_of_landing(home: Home, tmp_path: Path) -> None:
    for number, rows in enumerate(STORY, 1):
        write(home, number, rows)
        landing = Landing(home)
        assert landing.step()
        assert found(home) == [one for one in EXPECTED if one[0] <= (rows[-1].received_at_ms - START) / 1000]
    assert (Landing(home).gateways.known, listed(home)) == (KNOWN, LISTED)
    other = Home(tmp_path / "other")
    other.prepare(None)
    for number, rows in enumerate(STORY, 1):
        write(other, number, rows)
    landing = Landing(other)
    landing.step()
    assert (landing.gateways.known, found(other), listed(other)) == (KNOWN, EXPECTED, LISTED)


def test_a_restart_of_landing_keeps_the_order_in_which_births_were_sent(home: Home) -> None:
    first, second = ({"gateway": "g", "boot": "p", "session": str(one), "seq": one, "ts": START + 1000 * one} for one in (1, 2))
    story = [[message(1, "g", "birth", **first)], [message(2, "g", "birth", **second)], [message(3, "g", "birth", **first)]]
    for number, rows in enumerate([*story, [message(4, "g", "death", gateway="g", session="2")]], 1):
        write(home, number, rows)
        landing = Landing(home)
        assert landing.step()
    assert (Landing(home).gateways.known["g"].seq, found(home)) == (2, [(4.0, "g", "death")])
    assert listed(home) == ["g session", "g session", "g death"]


def test_a_landing_killed_before_it_writes_messages_finds_the_same_events(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    append_rows = tables.append_of

    def append_until_messages(at: Home, table: Any, *more: Any) -> None:
        if table is MESSAGES:
            raise KeyboardInterrupt
        append_rows(at, table, *more)

    for number, rows in enumerate(STORY, 1):
        write(home, number, rows)
        with monkeypatch.context() as patched:
            patched.setattr(landing_module.tables, "append_of", append_until_messages)
            with pytest.raises(KeyboardInterrupt):
                Landing(home).step()
        assert Landing(home).step()
    assert (Landing(home).gateways.known, found(home), listed(home)) == (KNOWN, EXPECTED, LISTED)


def test_bronze_of_version_1_reads_with_the_deaths_of_gateways(home: Home) -> None:
    import pyarrow.parquet as pq

    write(home, 1, [message(1, "g", "death", gateway="g"), message(2, "d", "death"), message(3, "d", "birth", gateway="g")])
    Landing(home).step()
    [path] = tables.paths_of(home, MESSAGES)
    before = pq.read_table(path)
    pq.write_table(before.drop_columns(["gateway_event"]), path)
    assert read_bronze(str(path))["gateway_event"].to_pylist() == ["death", None, None]
