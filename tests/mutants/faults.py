"""The planted faults: each is a slip that a person could make, and names the tests that must fail with it.

Rule 1: a fault is small: a bound that is taken in or left out, a condition that is turned round or missing.
Rule 2: an old text stands exactly once in its file; a unit test holds that, so that the list follows the code.
Rule 3: a test is named as ``file::function``; one that fails is enough, so that a cheap one goes first.
Rule 4: a fault of the definition is planted in the kernel too, where their comparison alone would notice it.
"""

from typing import Final, NamedTuple

_FEW_STEPS: Final = (("FLEET_STEPS", "300"),)

_ARRIVALS: Final = "tests/property/io/ingest/test_batch_decode.py"
_BRIDGES: Final = "tests/unit/streaming/landing/test_backlog.py"
_COLUMNAR: Final = "tests/property/columnar/fold/test_key_group.py::test_the_columnar_fold_equals_the_definition_at_every_step"
_DEVICE: Final = "tests/unit/core/test_device.py"
_FLOOD: Final = "tests/unit/streaming/bridge/test_rate_limit.py"
_GATEWAYS: Final = "tests/unit/core/presence/test_gateways.py"
_INTAKE: Final = "tests/unit/streaming/bridge/test_sequencer.py"
_LANDING: Final = "tests/unit/streaming/landing/test_landing.py"
_MERGING: Final = "tests/property/streaming/landing/test_merge.py"
_ANY_INTAKE: Final = (
    "tests/property/streaming/bridge/test_sequencer.py"
    "::test_whatever_comes_in_whatever_order_stamps_tokens_gaps_and_promises_are_kept"
)
_SHARDS: Final = "tests/unit/core/presence/test_shards.py"
_ACROSS: Final = (
    "tests/property/core/presence/test_shards.py::test_devices_of_several_shards_are_judged_the_same_however_rows_are_cut"
)
_ORACLE: Final = "tests/property/core/test_oracle.py::test_the_definition_says_what_the_oracle_says"


class Change(NamedTuple):
    """One change of a fault.

    Attributes:
        file: path from the root of the project.
        old: a text that stands once in the file.
        new: the text in its place.
    """

    file: str
    old: str
    new: str


# The fold runs as Python in the copy: to compile it takes 38 s of CPU, anew for each fault in it or in the core.
INTERPRETED: Final = (
    Change(
        "fleetpulse/columnar/jit/cache.py",
        "jit_no_refcount: Final[Any] = njit(**_FLAGS)\n",
        """def _plain(found: Any) -> Any:
    return tuple(map(_plain, found)) if isinstance(found, tuple) else found.item() if hasattr(found, "item") else found


def jit_no_refcount(function: Any) -> Any:
    if function.__module__.rpartition(".")[2] not in ("kernel", "deadlines", "world", "ordering"):
        return njit(**_FLAGS)(function)
    return lambda *arguments: _plain(function(*arguments))
""",
    ),
    Change(
        "fleetpulse/columnar/jit/sources.py", "SOURCES_DIGEST: Final = digest_of(_SOURCES)", 'SOURCES_DIGEST: Final = "mutants"'
    ),
)


class Fault(NamedTuple):
    """A planted fault.

    Attributes:
        name: by which ``--only`` chooses it.
        changes: all of them are made together.
        tests: of which at least one must fail, as ``file::function``.
        environment: variables for the tests, as pairs.
    """

    name: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


def _fault(name: str, file: str, old: str, new: str, *tests: str, environment: tuple[tuple[str, str], ...] = ()) -> Fault:
    return Fault(name, (Change(file, old, new),), tests, environment)


FAULTS: Final = (
    # ---- the definition
    _fault(
        "table-lets-no-maintenance-end",
        "fleetpulse/core/lifecycle.py",
        "        (_M.MAINTENANCE, _T.UNTIL): _M.ONLINE,\n",
        "",
        "tests/unit/core/test_lifecycle.py::test_the_table_is_the_one_that_was_reviewed",
    ),
    Fault(
        "flagged-window-leaves-out-its-end",
        (
            Change("fleetpulse/core/fold.py", "start > rules.flagged_window_ms", "start >= rules.flagged_window_ms"),
            Change(
                "fleetpulse/columnar/jit/kernel.py",
                "start_ms > world.rules[policy, of_class, FLAGGED_WINDOW]",
                "start_ms >= world.rules[policy, of_class, FLAGGED_WINDOW]",
            ),
        ),
        (f"{_DEVICE}::test_a_sequence_that_ends_exactly_with_the_window_flags_and_one_a_millisecond_longer_does_not",),
    ),
    Fault(
        "runtime-leaves-out-a-gap-of-the-timeout",
        (
            Change(
                "fleetpulse/core/fold.py",
                "gap <= self._rules(device, at_ms).timeout_ms",
                "gap < self._rules(device, at_ms).timeout_ms",
            ),
            Change("fleetpulse/columnar/jit/kernel.py", "and gap <= timeout_ms", "and gap < timeout_ms"),
        ),
        (_ORACLE,),
    ),
    _fault(
        "deadline-acts-before-a-message-of-its-instant",
        "fleetpulse/core/fold.py",
        "due[0] >= before_ms",
        "due[0] > before_ms",
        f"{_DEVICE}::test_a_message_exactly_at_the_deadline_is_in_time",
    ),
    _fault(
        "degraded-window-leaves-out-its-end",
        "fleetpulse/core/fold.py",
        "at_ms - then <= rules.degraded_window_ms",
        "at_ms - then < rules.degraded_window_ms",
        f"{_DEVICE}::test_errors_degrade_until_the_window_has_passed_the_oldest_of_the_newest",
    ),
    _fault(
        "will-stands-though-the-device-was-heard-after-it",
        "fleetpulse/core/fold.py",
        "device.proved_arrival is not None and device.proved_arrival >= row.arrival",
        "device.proved_arrival is not None and device.proved_arrival >= 2**83",
        "tests/unit/core/presence/test_presence_time.py::test_inputs_from_the_field_are_judged_right",
    ),
    _fault(
        "time-without-a-gateway-is-silence",
        "fleetpulse/core/fold.py",
        "quiet_ms = device.quiet_covered_ms + device.excused_ms",
        "quiet_ms = device.quiet_covered_ms",
        f"{_DEVICE}::test_the_time_without_a_gateway_is_not_its_devices_silence",
    ),
    _fault(
        "gateways-death-ignores-who-was-heard-after-it",
        "fleetpulse/core/fold.py",
        "if not stays and not _was_heard_after(device, row):",
        "if not stays:",
        "tests/unit/core/presence/test_presence_time.py::test_inputs_from_the_field_are_judged_right",
        _ORACLE,
    ),
    _fault(
        "data-from-before-a-gateways-death-is-its-return",
        "fleetpulse/core/presence/gateways.py",
        "_sent_ms(row) > dead_since_ms",
        "_sent_ms(row) > 0",
        f"{_GATEWAYS}::test_what_another_gateway_delivers_is_a_return_if_it_was_sent_after_the_death",
    ),
    _fault(
        "landing-forgets-the-gateways-that-are-dead",
        "streaming/landing/landing.py",
        "self.gateways.restore(known_gateways(home, through))",
        "self.gateways.restore([])",
        f"{_GATEWAYS}::test_one_landing_finds_what_many_find_that_start_again",
    ),
    _fault(
        "longest-hold-is-refused",
        "fleetpulse/core/policy.py",
        "at_ms < until_ms <= at_ms + self.longest_hold_ms",
        "at_ms < until_ms < at_ms + self.longest_hold_ms",
        f"{_DEVICE}::test_a_hold_beyond_the_policy_is_refused",
    ),
    _fault(
        "gap-reaches-behind-the-frontier",
        "fleetpulse/core/presence/coverage.py",
        "since = max(since, self.frontier_ms)",
        "since = max(since, 0)",
        "tests/unit/core/test_values.py::test_a_gap_never_reaches_behind_the_frontier",
    ),
    _fault(
        "message-at-the-frontier-is-in-time",
        "fleetpulse/core/replay.py",
        "row.event_time_ms > frontier_ms or self._amends",
        "row.event_time_ms >= frontier_ms or self._amends",
        f"{_DEVICE}::test_a_command_for_the_frontier_is_refused_and_one_for_the_instant_after_it_counts",
    ),
    # ---- the columns
    _fault(
        "kernel-wakes-for-its-last-device-alone",
        "fleetpulse/columnar/jit/kernel.py",
        "left_ms = min(left_ms, due_ms - through_ms[i])",
        "left_ms = due_ms - through_ms[i]",
        _COLUMNAR,
        environment=(("FLEET_STEPS", "3000"),),
    ),
    _fault(
        "kernel-takes-a-number-that-stays-for-a-reboot",
        "fleetpulse/columnar/jit/kernel.py",
        "    if after >= before:\n        return False",
        "    if after > before:\n        return False",
        _COLUMNAR,
        environment=_FEW_STEPS,
    ),
    _fault(
        "kernel-lets-a-will-go-before-silence",
        "fleetpulse/columnar/jit/deadlines.py",
        "if dead_ms < due_ms:",
        "if dead_ms <= due_ms:",
        "tests/property/core/presence/test_presence_time.py::test_silence_acts_before_a_will_whose_grace_ends_at_the_same_instant",
    ),
    _fault(
        "group-wakes-for-no-row-that-waits",
        "fleetpulse/columnar/fold/key_group.py",
        "        self._be_due_for_waiting(deployment)\n        kept =",
        "        kept =",
        _COLUMNAR,
        environment=_FEW_STEPS,
    ),
    _fault(
        "row-at-the-frontier-is-taken-twice",
        "fleetpulse/columnar/fold/pending.py",
        "due &= event_ms > after_ms",
        "due &= event_ms >= after_ms",
        "tests/unit/columnar/fold/test_pending.py::test_a_row_at_the_frontier_is_taken_once_though_its_chunk_stays_for_a_later_one",
    ),
    # ---- the bridge
    _fault(
        "canary-of-before-closes-a-gap",
        "streaming/bridge/sequencer.py",
        "if self.gap_open and number > self._opened_at:",
        "if self.gap_open:",
        f"{_INTAKE}::test_a_canary_that_was_sent_before_the_gap_was_opened_does_not_close_it",
    ),
    _fault(
        "message-shares-the-instant-of-a-row-of-ours",
        "streaming/bridge/sequencer.py",
        "max(now_ms, self.last_ms + self._own_last)",
        "max(now_ms, self.last_ms)",
        _ANY_INTAKE,
    ),
    _fault(
        "row-of-ours-shares-the-instant-of-a-message",
        "streaming/bridge/sequencer.py",
        "received_at_ms = now_ms if self.last_ms is None else max(now_ms, self.last_ms + 1)",
        "received_at_ms = now_ms if self.last_ms is None else max(now_ms, self.last_ms)",
        _ANY_INTAKE,
    ),
    _fault(
        "commands-about-one-device-share-an-instant",
        "streaming/bridge/sequencer.py",
        "            devices.add(device)\n",
        "",
        _ANY_INTAKE,
    ),
    _fault(
        "row-is-stamped-with-what-was-promised",
        "streaming/bridge/sequencer.py",
        "max(now_ms, self.promised_ms + 1)",
        "max(now_ms, self.promised_ms)",
        _ANY_INTAKE,
    ),
    _fault(
        "lost-connection-keeps-what-comes-again",
        "streaming/bridge/sequencer.py",
        "            if token is None:\n                self.buffer.add(row, None)\n",
        "            if row:\n                self.buffer.add(row, token)\n",
        _ANY_INTAKE,
    ),
    _fault(
        "written-tokens-are-given-back-again",
        "streaming/bridge/sequencer.py",
        "+ self.buffer.passed\n        self.buffer, self._spared = SegmentBuffer(), SparedMessages(self._floods.sender)\n",
        "+ (passed := self.buffer.passed)\n"
        "        self.buffer, self._spared = SegmentBuffer(), SparedMessages(self._floods.sender)\n"
        "        self.buffer.passed = passed\n",
        _ANY_INTAKE,
    ),
    _fault(
        "flood-lets-one-more-in",
        "streaming/bridge/rate_limit.py",
        "if left < 1:",
        "if left < 0:",
        f"{_FLOOD}::test_a_device_may_send_its_burst_and_then_its_limit",
    ),
    _fault(
        "flood-counts-what-comes-again-twice",
        "streaming/bridge/rate_limit.py",
        "self._left[device] = (left + 1, at_ms)",
        "self._left[device] = (left, at_ms)",
        f"{_FLOOD}::test_what_was_let_go_of_and_comes_again_is_counted_once",
    ),
    _fault(
        "flood-spares-every-message",
        "streaming/bridge/rate_limit.py",
        "return before[1] if before is not None and before[0] == second else None",
        "return None",
        f"{_FLOOD}::test_a_flood_costs_data_and_never_presence",
    ),
    _fault(
        "flood-spares-one-message-only",
        "streaming/bridge/rate_limit.py",
        "and before[0] == second else None",
        "else None",
        f"{_FLOOD}::test_of_what_is_beyond_the_limit_the_newest_message_of_each_second_counts",
    ),
    # ---- limits and identities of devices
    _fault(
        "kernel-ignores-a-timeout-of-its-own",
        "fleetpulse/columnar/jit/deadlines.py",
        "own = devices[i, OWN_TIMEOUT]",
        "own = NONE",
        "tests/property/core/presence/test_presence_time.py::test_the_fold_agrees_with_the_definition_on_inputs_from_the_field",
    ),
    _fault(
        "conflict-is-seen-a-day-after-a-move",
        "fleetpulse/core/fold.py",
        "at_ms - device.moved_ms < CONFLICT_MS",
        "at_ms - device.moved_ms <= CONFLICT_MS",
        "tests/unit/core/presence/test_presence_time.py::test_an_identity_conflict_is_reported_once_a_day_and_not_where_the_device_is_back_a_day_later",
    ),
    _fault(
        "firmware-ends-no-update",
        "fleetpulse/columnar/jit/kernel.py",
        "or (firmware >= 0 and devices[i, FIRMWARE] != firmware)",
        "",
        "tests/property/core/presence/test_presence_time.py::test_the_fold_agrees_with_the_definition_on_inputs_from_the_field",
    ),
    _fault(
        "gateway-is-that-of-another-site",
        "streaming/landing/rows.py",
        'for name in ("device_id", "gateway"):',
        'for name in ("device_id",):',
        "tests/unit/core/presence/test_identities.py::test_one_id_at_two_sites_is_two_devices",
    ),
    # ---- landing
    _fault(
        "rows-are-committed-without-their-place",
        "streaming/landing/landing.py",
        "{**numbers, NEWEST: newest_ms, **more}",
        "{NEWEST: newest_ms, **more}",
        f"{_LANDING}::test_killed_before_it_has_tidied_it_goes_on",
    ),
    _fault(
        "landing-leaves-a-promised-instant",
        "streaming/landing/merge.py",
        'side="right"',
        'side="left"',
        f"{_MERGING}::test_rows_land_once_in_order_and_no_instant_twice",
    ),
    _fault(
        "late-rows-land-at-what-has-landed",
        "streaming/landing/merge.py",
        "np.maximum(stamps, landed_ms + 1)",
        "np.maximum(stamps, landed_ms)",
        f"{_MERGING}::test_what_surfaces_behind_what_has_landed_is_lifted_and_keeps_its_order",
    ),
    # ---- shards
    _fault(
        "gap-of-a-site-is-everybodys",
        "fleetpulse/core/presence/shards.py",
        "one.open_gap(row_ms, since_ms, bridge) if its else one",
        "one.open_gap(row_ms, since_ms, bridge)",
        f"{_SHARDS}::test_a_bridge_that_has_not_listened_for_sixty_hours_holds_back_its_own_sites_alone",
    ),
    _fault(
        "silence-is-left-behind-by-a-move",
        "fleetpulse/core/fold.py",
        "        device.quiet_covered_ms += moved_ms\n",
        "",
        f"{_SHARDS}::test_a_device_that_moves_to_a_site_that_is_held_back_takes_its_silence_along",
    ),
    _fault(
        "old-signal-voids-a-will",
        "fleetpulse/core/fold.py",
        "row.received_at_ms >= death_ms and (",
        "(",
        f"{_SHARDS}::test_an_old_signal_from_a_held_back_site_does_not_bring_back_a_device_that_has_died_since",
    ),
    _fault(
        "row-counts-before-what-was-judged",
        "fleetpulse/core/fold.py",
        "advance.judged_before(each, device.current_site) + 1)",
        "0)",
        _ACROSS,
    ),
    _fault(
        "gateway-event-acts-twice",
        "fleetpulse/core/presence/shards.py",
        "(begun_ms is None or row.at_ms > begun_ms)",
        "True",
        _ACROSS,
    ),
    _fault(
        "split-loses-the-rows-of-gateways",
        "fleetpulse/columnar/fold/key_group.py",
        "rows, width_ms, {source, *of_source})",
        "rows, width_ms, of_source)",
        _COLUMNAR,
        environment=(("FLEET_STEPS", "20000"),),
    ),
    _fault(
        "late-birth-names-no-session",
        "fleetpulse/core/fold.py",
        "elif newest and row.kind is Kind.BIRTH and row.is_direct:",
        "elif False:",
        "tests/unit/core/presence/test_presence_time.py::test_a_late_birth_names_the_session_so_that_its_will_takes_effect",
    ),
    # ---- files and tables
    _fault(
        "newest-segment-is-removed",
        "streaming/landing/backlog.py",
        "in list_segments(folder)[:-1]",
        "in list_segments(folder)",
        f"{_BRIDGES}::test_the_newest_segment_stays_when_all_is_landed",
    ),
    _fault(
        "segment-replaces-another",
        "fleetpulse/io/ingest/segments.py",
        "        os.link(aside, path)  # unlike a rename, a link does not replace an existing file\n        aside.unlink()\n",
        "        aside.replace(path)\n",
        f"{_BRIDGES}::test_a_number_is_given_once",
    ),
    _fault(
        "two-append-in-one-name",
        "fleetpulse/io/delta/appender.py",
        'if "txn" in action} & numbers.keys()):',
        'if "txn" in action} & set[str]()):',
        "tests/unit/io/delta/test_appender.py::test_two_that_append_in_one_name_are_told_apart",
    ),
    _fault(
        "commands-are-given-out-of-turn",
        "fleetpulse/io/home/command_spool.py",
        "turn.enter_context(folder_held(home.commands))",
        "folder_held(home.commands)",
        "tests/unit/core/registry/test_device_patch.py::test_of_two_corrections_at_once_the_second_sees_the_first",
    ),
)
