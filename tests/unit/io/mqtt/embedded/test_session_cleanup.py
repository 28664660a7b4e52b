"""Abandoned sessions of the broker: which of them are removed."""

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from fleetpulse.core.presence.identities import DeviceIdentity
from fleetpulse.io.home.home import Home
from fleetpulse.io.mqtt.acl import SERVICE_USER, Role, grant
from fleetpulse.io.mqtt.embedded.broker_api import BrokerApi
from fleetpulse.io.mqtt.embedded.session_cleanup import (
    OF_DEVICE,
    OF_OTHERS,
    Session,
    Sessions,
    lagging,
    own_sessions,
    readers,
)
from fleetpulse.io.mqtt.embedded_sessions import derived_client_id

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("subjects", "owner"),
    [
        ((), None),
        (["fleet.oslo.pump-1.control"], "pump-1"),
        (["fleet.oslo.pump-1.command"], "pump-1"),
        (["fleet.a.pump-2.control", "fleet.b.pump-1.control"], "pump-1"),
        (["spBv1//0.STATE.*", "spBv1//0.plant.NCMD.line", "spBv1//0.plant.DCMD.line.>"], "plant/line"),
        (["fleet.>"], ""),
        (["fleet.oslo.pump-1.control.x"], ""),
        (["fleet.a.pump-1.control", "fleet.>"], ""),
        (["spBv1//0.STATE.*"], ""),
    ],
)
def test_the_filters_of_a_session_name_its_owner(subjects: list[str], owner: str | None) -> None:
    content = {"id": "c", "subs": dict.fromkeys(subjects, 1)} if subjects else {"id": "c"}
    record = {"seq": 7, "data": base64.b64encode(json.dumps(content).encode()).decode()}
    assert Session.parse(record, DeviceIdentity.ID) == Session("c", 7, owner)


def test_a_session_belongs_to_the_device_at_its_site_where_that_is_a_part_of_its_identity() -> None:
    """A device at another site must not use up the sessions of this one."""
    record = {"seq": 7, "data": base64.b64encode(b'{"id": "c", "subs": {"fleet.oslo.pump-1.control": 1}}').decode()}
    assert Session.parse(record, DeviceIdentity.SITE_AND_ID).owner == "oslo/pump-1"


def _known(owners: Iterable[str | None]) -> Sessions:
    known = Sessions()
    for number, owner in enumerate(owners):
        known.add(Session(f"{number:04}", number, owner))
    return known


def _removed(known: Sessions, *connected: int, own: Iterable[int] = (), crowded: bool = False) -> list[int]:
    ids, own_ids = ([f"{number:04}" for number in numbers] for numbers in (connected, own))
    found = known.abandoned(ids, tuple(own_ids), crowded=crowded)
    return [one.sequence for one in found]


def test_the_newest_sessions_of_each_device_remain() -> None:
    known = _known(["a", "b"] * (OF_DEVICE + 3))
    assert _removed(known) == [0, 1, 2, 3, 4, 5]
    assert _removed(known, 0, 2) == [1, 3, 4, 5], "a connected one is not removed, and does not count"
    known.add(Session("0000", 1_000, "a"))
    assert _removed(known) == [1, 2, 3, 4, 5, 6], "a session that connected again is the newest"


def test_a_session_without_filters_does_not_remain() -> None:
    assert _removed(_known([None, "a", None]), 2) == [0]


def test_sessions_of_watchers_remain_until_they_fill_the_store() -> None:
    known = _known(["a", *[""] * (OF_OTHERS + 1)])
    assert _removed(known) == [1]
    assert _removed(known, 2, own=[3], crowded=True) == [1, *range(4, OF_OTHERS + 2)]


def test_own_sessions_are_never_removed(tmp_path: Path) -> None:
    assert _removed(_known([None, "", "a"]), own=[0, 1, 2], crowded=True) == []
    home, known = Home(tmp_path), Sessions()
    home.broker.mkdir()
    secret = home.session("bridge-1")
    ids = [derived_client_id(secret, topic) for topic in ("fleet/#", "tele/+/STATE")]
    for number, client_id in enumerate((*ids, secret, home.session("replay"), "another")):
        known.add(Session(client_id, number, ""))
    assert [one.client_id for one in known.abandoned((), own_sessions(home.broker), crowded=True)] == ["another"]


def test_only_connected_sessions_of_watchers_and_operators_may_be_removed(tmp_path: Path) -> None:
    for name, role in (("ann", Role.WATCHER), ("bob", Role.OPERATOR), ("pump-1", Role.DEVICE)):
        grant(tmp_path, name, role)
    users = dict(zip(map("{:04}".format, range(6)), ("ann", "bob", "pump-1", SERVICE_USER, "ann", "ann"), strict=True))
    found = _known([""] * 5).connected(users, readers(tmp_path), ("0004",))
    assert [one.sequence for one in found] == [0, 1], "0004 is fleetpulse's own, and 0005 has no session yet"
    (tmp_path / "access.json").write_text("{")
    assert readers(tmp_path) == set()


def test_a_session_lags_if_too_many_messages_wait_in_all_of_its_queues() -> None:
    queues = {0: ((0, 5), (0, 5)), 1: ((6, 0), (0, 5)), 2: (), 3: ((0, 11),)}

    def ask(subject: str, content: dict[str, Any]) -> dict[str, Any]:
        if "seq" not in content:
            number, place = subject.rpartition(".")[2].split("_")
            waiting, sent = queues[int(number)][int(place)]
            return {"num_pending": waiting, "num_ack_pending": sent}
        number = content["seq"]
        if number == 3:
            return {"error": {"code": 404, "description": "no message found"}}
        queued = {f"f{place}": {"durable_name": f"{number}_{place}"} for place in range(len(queues[number]))}
        data = {"id": "c", "cons": queued} if queued else {"id": "c"}
        return {"message": {"seq": number, "data": base64.b64encode(json.dumps(data).encode()).decode()}}

    known = [Session(f"{number:04}", number, "") for number in queues]
    assert [one.sequence for one in lagging(cast("BrokerApi", ask), known, 10)] == [1]
