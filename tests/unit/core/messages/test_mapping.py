"""Mappings of foreign topics: messages become rows, and an invalid mapping is refused."""

from fleetpulse.core.messages.mapping import decode_mapped, parse_mappings
from fleetpulse.core.rows import Origin, Row
from tests.support.refusals import refused

NOW = 1_700_000_000_000


def test_a_mapping_decodes_messages_of_a_foreign_device() -> None:
    mappings = parse_mappings(
        {
            "mapping": [
                {
                    "topic": "zigbee/{device}/state",
                    "site": "home",
                    "kind": "telemetry",
                    "ts": "meta.at",
                    "ts_unit": "s",
                    "seq": "n",
                }
            ]
        }
    )
    row = decode_mapped(mappings, "zigbee/lamp/state", b'{"meta": {"at": 1700000000}, "n": 7}', NOW, Origin.MQTT)
    assert isinstance(row, Row)
    assert (row.device_id, row.site, row.event_time_ms, row.seq) == ("lamp", "home", NOW, 7)
    assert mappings[0].subscription == "zigbee/+/state"


def test_an_invalid_mapping_is_refused_with_all_its_faults() -> None:
    with refused("mapping-faulty") as caught:
        parse_mappings({"mapping": [{"topic": "a/{thing}", "ts_unit": "h"}]})
    assert len(str(caught.value).splitlines()) == 6
