"""List of planted faults: each is a plausible mistake, with the tests that must catch it.

Rule 1: a fault is small: an inclusive bound made exclusive or the reverse, or a condition negated or removed.
Rule 2: an old text occurs exactly once in its file; a unit test checks this, so that the list follows the code.
Rule 3: a test is written as ``file::function``; one failing test is sufficient, so the cheapest comes first.
Rule 4: a fault of the definition is also planted in the kernel if otherwise only their comparison would fail.
"""

from typing import Final, NamedTuple

_FEW_STEPS: Final = (("FLEET_STEPS", "300"),)

_ARRIVALS: Final = "tests/property/io/ingest/test_batch_decode.py"
_BACKLOG: Final = "tests/unit/streaming/landing/test_backlog.py"
_COLUMNAR: Final = "tests/property/columnar/fold/test_key_group.py::test_the_columnar_fold_equals_the_definition_at_every_step"
_FOLD: Final = "tests/unit/core/test_fold.py"
_RATE_LIMIT: Final = "tests/unit/streaming/bridge/test_rate_limit.py"
_TOKEN_BUCKETS: Final = "tests/property/streaming/bridge/test_token_buckets.py"
_GATEWAYS: Final = "tests/unit/core/presence/test_gateways.py"
_SEQUENCER: Final = "tests/unit/streaming/bridge/test_sequencer.py"
_LANDING: Final = "tests/unit/streaming/landing/test_landing.py"
_MERGING: Final = "tests/property/streaming/landing/test_merge.py"
_SEQUENCER_LAWS: Final = (
    "tests/property/streaming/bridge/test_sequencer.py::test_laws_of_the_sequencer_hold_for_any_order_of_events"
)
_SHARDS: Final = "tests/unit/core/presence/test_shards.py"
_SHARD_LAWS: Final = (
    "tests/property/core/presence/test_shards.py::test_batch_cuts_do_not_change_the_judgements_of_devices_in_several_shards"
)
_ORACLE: Final = "tests/property/core/test_oracle.py::test_the_definition_and_the_oracle_emit_the_same_judgements"


class Change(NamedTuple):
    """Change of one file by a fault.

    Attributes:
        file: path from the root of the project.
        old: text that occurs exactly once in the file.
        new: replacement text.
    """

    file: str
    old: str
    new: str


# The copy runs the fold as Python, because each fault in the fold or the core would compile it again (38 s of CPU).
INTERPRETED: Final = (
    Change(
        "fleetpulse/columnar/jit/cache.py",
        "jit_no_refcount: Final[Any] = njit(**_FLAGS)\n",
        """def _plain(found: Any) -> Any:
    return tuple(map(_plain, found)) if isinstance(found, tuple) else found.item() if hasattr(found, "item") else found


def jit_no_refcount(function: Any) -> Any:
    fold = ("kernel", "signals", "errors", "transitions", "deadlines", "sending_order", "context", "ordering")
    if function.__module__.rpartition(".")[2] not in fold:
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
        name: name for the option ``--only``.
        changes: changes, which are made together.
        tests: tests as ``file::function``; at least one must fail.
        environment: environment variables of the tests, as pairs.
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
        "maintenance-never-ends",
        "fleetpulse/core/lifecycle.py",
        "        (_M.MAINTENANCE, _T.UNTIL): _M.ONLINE,\n",
        "",
        "tests/unit/core/test_lifecycle.py::test_the_transition_table_equals_the_reviewed_matrix",
    ),
    Fault(
        "flagged-window-excludes-its-end",
        (
            Change("fleetpulse/core/signals.py", "start > rules.flagged_window_ms", "start >= rules.flagged_window_ms"),
            Change(
                "fleetpulse/columnar/jit/errors.py",
                "start_ms > context.rules[policy, of_class, FLAGGED_WINDOW]",
                "start_ms >= context.rules[policy, of_class, FLAGGED_WINDOW]",
            ),
        ),
        (f"{_FOLD}::test_a_sequence_flags_a_device_if_it_ends_by_the_end_of_the_window",),
    ),
    Fault(
        "session-excludes-a-signal-at-its-limit",
        (
            Change(
                "fleetpulse/core/signals.py",
                "at_ms - device.quiet_since_ms > rules.session_idle_ms",
                "at_ms - device.quiet_since_ms >= rules.session_idle_ms",
            ),
            Change(
                "fleetpulse/columnar/jit/errors.py",
                "at_ms - devices[i, QUIET_SINCE] > context.rules[policy, of_class, SESSION_IDLE]",
                "at_ms - devices[i, QUIET_SINCE] >= context.rules[policy, of_class, SESSION_IDLE]",
            ),
        ),
        (f"{_FOLD}::test_a_session_ends_by_idleness_of_more_than_its_limit",),
    ),
    _fault(
        "alarm-counts-outside-a-session",
        "fleetpulse/core/fold.py",
        "if in_session and rules.is_event",
        "if rules.is_event",
        f"{_FOLD}::test_an_alarm_is_an_event_of_the_session_that_goes_on",
    ),
    _fault(
        "confirmed-flag-ends-after-its-hold",
        "fleetpulse/core/deadlines.py",
        "device.flagged_until_ms is not None and device.confirmed_ms is None",
        "device.flagged_until_ms is not None",
        f"{_FOLD}::test_a_confirmed_flag_ends_only_by_a_command",
    ),
    Fault(
        "runtime-excludes-a-gap-of-exactly-the-timeout",
        (
            Change(
                "fleetpulse/core/fold.py",
                "gap <= self._rules(device, at_ms).timeout_ms",
                "gap < self._rules(device, at_ms).timeout_ms",
            ),
            Change("fleetpulse/columnar/jit/signals.py", "and gap <= timeout_ms", "and gap < timeout_ms"),
        ),
        (_ORACLE,),
    ),
    _fault(
        "deadline-fires-before-a-message-of-its-instant",
        "fleetpulse/core/fold.py",
        "due[0] >= before_ms",
        "due[0] > before_ms",
        f"{_FOLD}::test_a_message_exactly_at_the_deadline_is_in_time",
    ),
    _fault(
        "degraded-window-excludes-its-end",
        "fleetpulse/core/fold.py",
        "at_ms - then <= rules.degraded_window_ms",
        "at_ms - then < rules.degraded_window_ms",
        f"{_FOLD}::test_errors_degrade_a_device_while_enough_of_them_lie_in_the_window",
    ),
    _fault(
        "will-takes-effect-despite-a-later-signal",
        "fleetpulse/core/signals.py",
        "device.proved_arrival is not None and device.proved_arrival >= row.arrival",
        "device.proved_arrival is not None and device.proved_arrival >= 2**83",
        "tests/unit/core/presence/test_presence_time.py::test_inputs_from_the_field_are_judged_correctly",
    ),
    _fault(
        "time-without-a-gateway-counts-as-silence",
        "fleetpulse/core/deadlines.py",
        "quiet_ms = device.quiet_covered_ms + device.excused_ms",
        "quiet_ms = device.quiet_covered_ms",
        f"{_FOLD}::test_a_gateway_outage_does_not_count_as_silence_of_its_devices",
    ),
    _fault(
        "gateway-death-ignores-later-signals",
        "fleetpulse/core/fold.py",
        "if not is_unaffected and not was_heard_after(device, row):",
        "if not is_unaffected:",
        f"{_FOLD}::test_a_gateways_death_does_not_affect_a_device_that_was_heard_after_it",
    ),
    _fault(
        "data-from-before-a-gateway-death-counts-as-its-return",
        "fleetpulse/core/presence/gateways.py",
        "_sent_ms(row) > dead_since_ms",
        "_sent_ms(row) > 0",
        f"{_GATEWAYS}::test_a_signal_through_another_gateway_is_a_return_if_sent_after_the_death",
    ),
    _fault(
        "birth-delivered-again-names-the-session-of-a-gateway",
        "fleetpulse/core/presence/gateways.py",
        "    if precedes(",
        "    if False and precedes(",
        f"{_GATEWAYS}::test_a_birth_that_is_delivered_again_does_not_set_the_newest_session_back",
    ),
    _fault(
        "landing-forgets-dead-gateways",
        "streaming/landing/landing.py",
        "self.gateways.restore(known_gateways(home, through))",
        "self.gateways.restore([])",
        f"{_GATEWAYS}::test_gateway_events_do_not_depend_on_restarts_of_landing",
    ),
    _fault(
        "hold-of-the-maximum-length-is-refused",
        "fleetpulse/core/policy.py",
        "at_ms < until_ms <= at_ms + self.longest_hold_ms",
        "at_ms < until_ms < at_ms + self.longest_hold_ms",
        f"{_FOLD}::test_a_hold_beyond_the_policy_is_refused",
    ),
    _fault(
        "gap-starts-before-the-frontier",
        "fleetpulse/core/presence/coverage.py",
        "since = max(since, self.frontier_ms)",
        "since = max(since, 0)",
        "tests/unit/core/presence/test_coverage.py::test_a_gap_never_reaches_behind_the_frontier",
    ),
    _fault(
        "message-at-the-frontier-is-in-time",
        "fleetpulse/core/replay.py",
        "row.event_time_ms > frontier_ms or self._amends",
        "row.event_time_ms >= frontier_ms or self._amends",
        f"{_FOLD}::test_a_command_is_accepted_only_for_an_instant_after_the_frontier",
    ),
    # ---- the columnar fold
    _fault(
        "kernel-wakes-only-for-its-last-device",
        "fleetpulse/columnar/jit/kernel.py",
        "left_ms = min(left_ms, due_ms - through_ms[i])",
        "left_ms = due_ms - through_ms[i]",
        _COLUMNAR,
        environment=(("FLEET_STEPS", "3000"),),
    ),
    _fault(
        "kernel-counts-an-unchanged-counter-as-a-reboot",
        "fleetpulse/columnar/jit/sending_order.py",
        "    if after >= before:\n        return False",
        "    if after > before:\n        return False",
        _COLUMNAR,
        environment=_FEW_STEPS,
    ),
    _fault(
        "kernel-fires-a-will-before-silence",
        "fleetpulse/columnar/jit/deadlines.py",
        "if dead_ms < due_ms:",
        "if dead_ms <= due_ms:",
        "tests/property/core/presence/test_presence_time.py::test_silence_fires_before_a_will_whose_grace_period_ends_at_the_same_instant",
    ),
    _fault(
        "group-does-not-wake-for-pending-rows",
        "fleetpulse/columnar/fold/key_group.py",
        "        self._set_due_for_pending(deployment)\n        remaining =",
        "        remaining =",
        _COLUMNAR,
        environment=_FEW_STEPS,
    ),
    _fault(
        "row-at-the-frontier-is-judged-twice",
        "fleetpulse/columnar/fold/pending.py",
        "due &= event_ms > after_ms",
        "due &= event_ms >= after_ms",
        "tests/unit/columnar/fold/test_pending.py::test_a_row_at_the_frontier_is_taken_once_though_its_chunk_remains",
    ),
    # ---- the bridge
    _fault(
        "older-canary-closes-a-gap",
        "streaming/bridge/sequencer.py",
        "if self.gap_open and number > self._opened_at:",
        "if self.gap_open:",
        f"{_SEQUENCER}::test_a_canary_that_was_sent_before_the_gap_was_opened_does_not_close_it",
    ),
    _fault(
        "message-shares-the-instant-of-an-own-row",
        "streaming/bridge/sequencer.py",
        "max(now_ms, self.last_ms + self._own_last)",
        "max(now_ms, self.last_ms)",
        _SEQUENCER_LAWS,
    ),
    _fault(
        "own-row-shares-the-instant-of-a-message",
        "streaming/bridge/sequencer.py",
        "received_at_ms = now_ms if self.last_ms is None else max(now_ms, self.last_ms + 1)",
        "received_at_ms = now_ms if self.last_ms is None else max(now_ms, self.last_ms)",
        _SEQUENCER_LAWS,
    ),
    _fault(
        "commands-for-one-device-share-an-instant",
        "streaming/bridge/sequencer.py",
        "            devices.add(device)\n",
        "",
        _SEQUENCER_LAWS,
    ),
    _fault(
        "row-is-stamped-with-the-promised-instant",
        "streaming/bridge/sequencer.py",
        "max(now_ms, self.promised_ms + 1)",
        "max(now_ms, self.promised_ms)",
        _SEQUENCER_LAWS,
    ),
    _fault(
        "lost-connection-keeps-redelivered-messages",
        "streaming/bridge/sequencer.py",
        "            if token is None:\n                self.buffer.add(row, None)\n",
        "            if row:\n                self.buffer.add(row, token)\n",
        _SEQUENCER_LAWS,
    ),
    _fault(
        "tokens-are-acknowledged-twice",
        "streaming/bridge/sequencer.py",
        "+ self.buffer.passed\n        self.buffer, self._spared = SegmentBuffer(), SparedMessages()\n",
        "+ (passed := self.buffer.passed)\n"
        "        self.buffer, self._spared = SegmentBuffer(), SparedMessages()\n"
        "        self.buffer.passed = passed\n",
        _SEQUENCER_LAWS,
    ),
    _fault(
        "rate-limit-admits-one-message-too-many",
        "streaming/bridge/token_buckets.py",
        "if left < 1 or",
        "if left < 0 or",
        f"{_RATE_LIMIT}::test_a_device_may_send_its_burst_and_then_its_limit",
    ),
    _fault(
        "rate-limit-counts-redelivered-messages-twice",
        "streaming/bridge/token_buckets.py",
        "            self._rows[slot] += rows\n",
        "",
        f"{_RATE_LIMIT}::test_dropped_and_redelivered_messages_are_counted_once",
    ),
    _fault(
        "rate-limit-spares-every-message",
        "streaming/bridge/rate_limit.py",
        "return before[1] if before is not None and before[0] == second else None",
        "return None",
        f"{_RATE_LIMIT}::test_a_flood_costs_data_and_never_presence",
    ),
    _fault(
        "rate-limit-spares-only-one-message",
        "streaming/bridge/rate_limit.py",
        "and before[0] == second else None",
        "else None",
        f"{_RATE_LIMIT}::test_newest_message_beyond_the_limit_in_each_second_is_spared",
    ),
    _fault(
        "rate-limit-ignores-the-size-of-messages",
        "streaming/bridge/token_buckets.py",
        "= left - 1, bytes_left - sizes[place], now_ms",
        "= left - 1, bytes_left, now_ms",
        f"{_RATE_LIMIT}::test_bytes_beyond_the_limit_are_refused_and_cut",
    ),
    _fault(
        "rate-limit-counts-a-batch-by-the-size-of-no-message",
        "streaming/bridge/token_buckets.py",
        "np.subtract.at(self._bytes, at, np.array(sizes, np.float64))",
        "np.subtract.at(self._bytes, at, 0.0)",
        f"{_TOKEN_BUCKETS}::test_messages_counted_together_equal_messages_counted_one_by_one",
    ),
    _fault(
        "rate-limit-of-a-batch-adds-no-tokens",
        "streaming/bridge/token_buckets.py",
        "left + elapsed_ms * per_ms, burst",
        "left, burst",
        f"{_TOKEN_BUCKETS}::test_messages_counted_together_equal_messages_counted_one_by_one",
    ),
    _fault(
        "quota-admits-every-new-device",
        "streaming/bridge/device_quota.py",
        "if self._left < 1:",
        "if self._left < 0:",
        "tests/unit/streaming/bridge/test_device_quota.py::test_new_devices_beyond_the_quota_are_refused_until_it_refills",
    ),
    _fault(
        "segment-keeps-every-message-of-a-flood",
        "streaming/bridge/buffer.py",
        "                if excess:\n",
        "                if not excess:\n",
        f"{_RATE_LIMIT}::test_flood_costs_a_segment_few_rows_which_count_its_messages",
    ),
    _fault(
        "quarantine-keeps-whole-payloads",
        "streaming/landing/rows.py",
        "raw.payload[:KEPT_BYTES]",
        "raw.payload",
        "tests/unit/streaming/landing/test_landing.py"
        "::test_quarantine_keeps_the_beginning_of_a_payload_and_the_number_of_messages",
    ),
    # ---- limits and identities of devices
    _fault(
        "kernel-ignores-the-timeout-of-a-device",
        "fleetpulse/columnar/jit/deadlines.py",
        "own = devices[i, OWN_TIMEOUT]",
        "own = NONE",
        "tests/property/core/presence/test_presence_time.py::test_the_fold_agrees_with_the_definition_on_inputs_from_the_field",
    ),
    _fault(
        "identity-conflict-is-reported-a-day-after-a-move",
        "fleetpulse/core/fold.py",
        "at_ms - device.moved_ms < CONFLICT_MS",
        "at_ms - device.moved_ms <= CONFLICT_MS",
        "tests/unit/core/presence/test_presence_time.py::test_an_identity_conflict_is_a_return_within_a_day_and_reported_once_a_day",
    ),
    _fault(
        "new-firmware-does-not-end-an-update",
        "fleetpulse/columnar/jit/kernel.py",
        "or (firmware >= 0 and devices[i, FIRMWARE] != firmware)",
        "",
        "tests/property/core/presence/test_presence_time.py::test_the_fold_agrees_with_the_definition_on_inputs_from_the_field",
    ),
    _fault(
        "gateway-id-ignores-the-site",
        "streaming/landing/rows.py",
        'for name in ("device_id", "gateway"):',
        'for name in ("device_id",):',
        "tests/unit/core/presence/test_identities.py::test_one_id_at_two_sites_is_two_devices",
    ),
    # ---- landing
    _fault(
        "rows-are-committed-without-their-position",
        "streaming/landing/landing.py",
        "{**numbers, NEWEST: newest_ms, **more}",
        "{NEWEST: newest_ms, **more}",
        f"{_LANDING}::test_landing_killed_before_deleting_segments_resumes",
    ),
    _fault(
        "landing-holds-back-the-promised-instant",
        "streaming/landing/merge.py",
        'side="right"',
        'side="left"',
        f"{_MERGING}::test_rows_land_once_and_in_order_and_batches_share_no_instant",
    ),
    _fault(
        "late-rows-land-at-the-last-landed-instant",
        "streaming/landing/merge.py",
        "np.maximum(stamps, landed_ms + 1)",
        "np.maximum(stamps, landed_ms)",
        f"{_MERGING}::test_rows_older_than_landed_rows_get_later_instants_and_keep_their_order",
    ),
    # ---- shards
    _fault(
        "gap-of-one-site-affects-all-sites",
        "fleetpulse/core/presence/shards.py",
        "one.open_gap(row_ms, since_ms, bridge) if is_concerned else one",
        "one.open_gap(row_ms, since_ms, bridge)",
        f"{_SHARDS}::test_a_long_gap_of_a_bridge_holds_back_only_its_own_sites",
    ),
    _fault(
        "move-to-another-site-resets-silence",
        "fleetpulse/core/fold.py",
        "        device.quiet_covered_ms += moved_ms\n",
        "",
        f"{_SHARDS}::test_a_device_keeps_its_silence_when_it_moves_to_a_site_that_is_held_back",
    ),
    _fault(
        "old-signal-voids-a-will",
        "fleetpulse/core/signals.py",
        "row.received_at_ms >= death_ms and (",
        "(",
        f"{_SHARDS}::test_an_old_signal_from_a_held_back_site_does_not_revive_a_dead_device",
    ),
    _fault(
        "row-takes-effect-at-a-judged-instant",
        "fleetpulse/core/fold.py",
        "advance.judged_before(each, device.current_site) + 1)",
        "0)",
        _SHARD_LAWS,
    ),
    _fault(
        "gateway-event-is-applied-twice",
        "fleetpulse/core/presence/shards.py",
        "(former_ms is None or row.at_ms > former_ms)",
        "True",
        _SHARD_LAWS,
    ),
    _fault(
        "split-loses-gateway-rows",
        "fleetpulse/columnar/fold/key_group.py",
        "rows, width_ms, {source, *of_source})",
        "rows, width_ms, of_source)",
        "tests/property/columnar/fold/test_key_group.py::test_a_split_of_a_shard_keeps_its_pending_gateway_rows_in_each_part",
    ),
    _fault(
        "late-birth-starts-no-session",
        "fleetpulse/core/fold.py",
        "elif newest and not is_older and row.kind is Kind.BIRTH and row.is_direct:",
        "elif False:",
        "tests/unit/core/presence/test_presence_time.py::test_a_late_birth_names_the_session_so_that_its_will_takes_effect",
    ),
    _fault(
        "older-birth-delivered-again-names-the-session",
        "fleetpulse/core/fold.py",
        "            if newest and not is_older:\n",
        "            if newest:\n",
        "tests/unit/core/presence/test_presence_time.py::test_inputs_from_the_field_are_judged_correctly",
    ),
    # ---- files and tables
    _fault(
        "newest-segment-is-removed",
        "streaming/landing/backlog.py",
        "in list_segments(folder)[:-1]",
        "in list_segments(folder)",
        f"{_BACKLOG}::test_the_newest_segment_stays_when_all_is_landed",
    ),
    _fault(
        "segment-overwrites-another",
        "fleetpulse/io/ingest/segments.py",
        "        os.link(temporary, path)  # unlike a rename, a link does not replace an existing file\n"
        "        temporary.unlink()\n",
        "        temporary.replace(path)\n",
        f"{_BACKLOG}::test_segment_number_is_used_once",
    ),
    _fault(
        "two-appenders-share-one-name",
        "fleetpulse/io/delta/appender.py",
        'if "txn" in action} & numbers.keys()):',
        'if "txn" in action} & set[str]()):',
        "tests/unit/io/delta/test_appender.py::test_second_appender_with_the_same_writer_name_is_refused",
    ),
    _fault(
        "commands-are-spooled-concurrently",
        "fleetpulse/io/home/command_spool.py",
        "turn.enter_context(folder_held(home.commands))",
        "folder_held(home.commands)",
        "tests/unit/core/registry/test_device_patch.py::test_the_second_of_two_concurrent_corrections_sees_the_first",
    ),
)
