"""Matrix columns of the compiled fold: devices, error memory, rows, output.

Rule: each field has a name in a tuple of fields and a constant with its column. Times are epoch
milliseconds.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from fleetpulse.core.policy import MAX_ERRORS, MAX_SEQUENCE
from fleetpulse.core.rows import Trust

Matrix = NDArray[np.int64]

DEVICE_FIELDS: Final = (
    "site", "device_class", "gateway", "life_ms", "quiet_since_ms", "quiet_covered_ms", "mode", "transition_no", "mode_since_ms",
    "class_since_ms", "last_seen_ms", "boot", "seq", "reboots", "runtime_ms", "degraded_until_ms", "flagged_until_ms",
    "held_until_ms", "death_ms", "death_covered_ms", "outage_ms", "outage_covered_ms", "excused_ms", "session", "heard_arrival",
    "proved_arrival", "clock", "clock_offset_ms", "timeout_ms", "death_grace_ms", "firmware", "speaks_from", "spoke_from",
    "moved_ms", "conflict_ms", "memory",
)  # fmt: skip
(SITE, CLASS, GATEWAY, LIFE, QUIET_SINCE, QUIET_COVERED, MODE, NUMBER, MODE_SINCE, CLASS_SINCE, LAST_SEEN, BOOT, SEQ, REBOOTS,
 RUNTIME, DEGRADED_UNTIL, FLAGGED_UNTIL, HELD_UNTIL, DEATH, DEATH_COVERED, OUTAGE, OUTAGE_COVERED, EXCUSED, SESSION, HEARD,
 PROVED, CLOCK, CLOCK_OFFSET, OWN_TIMEOUT, OWN_GRACE, FIRMWARE, SPEAKS_FROM, SPOKE_FROM, MOVED, CONFLICT,
 MEMORY) = range(len(DEVICE_FIELDS))  # fmt: skip
TRUSTS: Final = tuple(Trust)  # the field clock and a row's trust are indices into this tuple
ABSENT: Final = -1  # the mode of a device without a state

# Error memory: one row for each device that had errors, or events of a velocity rule.
TIMES, N_TIMES = 0, MAX_ERRORS
CODES, N_CODES = N_TIMES + 1, N_TIMES + 1 + MAX_ERRORS
PROGRESS, PROGRESS_OF = N_CODES + 1, N_CODES + 1 + MAX_SEQUENCE
VELOCITY_COUNT, VELOCITY_SINCE, REVIEW, CONFIRMED = range(PROGRESS_OF + 1, PROGRESS_OF + 5)
MEMORY_WIDTH: Final = CONFIRMED + 1

ROW_FIELDS: Final = ("device", "presence_ms", "offset_ms", "arrival", "trust", "direct", "kind", "boot", "session", "seq", "code",
                     "gateway", "site", "firmware")  # fmt: skip
(R_DEVICE, R_AT, R_OFFSET, R_ARRIVAL, R_TRUST, R_DIRECT, R_KIND, R_BOOT, R_SESSION, R_SEQ, R_CODE, R_GATEWAY,
 R_SITE, R_FIRMWARE) = range(len(ROW_FIELDS))  # fmt: skip

GATEWAY_DEATH, GATEWAY_RETURN = -1, -2  # kinds of gateway events; those of messages are not negative

OUT_FIELDS: Final = ("what", "device", "at_ms", "row", "from", "to", "trigger", "number", "last_seen_ms", "runtime_ms",
                      "life_ms", "device_class", "site", "gateway", "policy", "shown")  # fmt: skip
(T_WHAT, T_DEVICE, T_AT, T_ROW, T_FROM, T_TO, T_TRIGGER, T_NUMBER, T_LAST_SEEN, T_RUNTIME, T_LIFE, T_CLASS, T_SITE, T_GATEWAY,
 T_POLICY, T_SHOWN) = range(len(OUT_FIELDS))  # fmt: skip
T_CODES: Final = len(OUT_FIELDS)
OUT_WIDTH: Final = T_CODES + MAX_ERRORS
TRANSITION, AFTER_DECOMMISSION, UNKNOWN_DEVICE, CLOCK_FAULT, IDENTITY_CONFLICT = range(5)
MAX_OUT_ROWS_PER_ROW: Final = 16  # upper bound of the output rows of one row and the deadlines before it
