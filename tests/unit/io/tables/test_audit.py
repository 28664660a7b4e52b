"""Records of actions in the table ``audit``, and their selection."""

import threading

import pytest

from fleetpulse.core.operations.audit import Phase
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.audit import AuditedAction, AuditTable
from fleetpulse.reports.operations.audit import UNFINISHED, audited_actions

pytestmark = pytest.mark.unit


def _action(name: str, asked_by: str | None = None, user: str = "root") -> AuditedAction:
    return AuditedAction(name, "{}", user, asked_by, "host", None)


def test_first_actions_at_the_same_time_are_all_recorded(home: Home) -> None:
    actions = [_action(f"device add {number}") for number in range(4)]

    def act(action: AuditedAction) -> None:
        table = AuditTable(home)
        table.write(action, Phase.STARTED)
        table.write(action, Phase.FINISHED, "ok", 7)

    threads = [threading.Thread(target=act, args=(one,), daemon=True) for one in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = {one["action"]: (one["result"], one["duration_ms"]) for one in audited_actions(home)}
    assert found == {one.action: ("ok", 7) for one in actions}


def test_actions_are_selected_by_instant_actor_and_first_words(home: Home) -> None:
    table = AuditTable(home)
    table.write(_action("access grant", "ada, fleet_migrate manual__1"), Phase.FINISHED, "ok", 1)
    table.write(_action("access revoke", user="ada"), Phase.FINISHED, "ok", 1)
    table.write(_action("accessory", "adam"), Phase.STARTED)
    everything = audited_actions(home)
    assert [(one["action"], one["result"]) for one in everything] == [
        ("access grant", "ok"),
        ("access revoke", "ok"),
        ("accessory", UNFINISHED),
    ]
    assert audited_actions(home, 2) == everything[1:]
    assert audited_actions(home, actor="ada") == everything[:2]
    assert audited_actions(home, action="access") == everything[:2]
    later_ms = round(everything[2]["began_at"].timestamp() * 1000)
    assert audited_actions(home, since_ms=later_ms, action="accessory") == everything[2:]
    assert audited_actions(home, since_ms=later_ms + 1) == []


def test_text_of_any_language_and_line_breaks_is_recorded_as_it_is(home: Home) -> None:
    AuditTable(home).write(
        AuditedAction("amend", '{"device": "Pümpe\\n\u2028"}', "rööt", "a\nb\x1b", "höst", "::1"), Phase.STARTED
    )
    [row] = audited_actions(home)
    assert (row["arguments"], row["os_user"], row["asked_by"]) == ('{"device": "Pümpe\\n\u2028"}', "rööt", "a\nb\x1b")
