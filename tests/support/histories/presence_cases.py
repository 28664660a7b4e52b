"""Presence cases from the field, with expected transitions and reboots.

Rule 1: each case represents inputs of real devices, such as wills that a reconnect overtakes, wrong
clocks, and counters that wrap.
Rule 2: each case has its own devices, and each case with gap rows its own site. All cases can
therefore be one recording.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from tests.support.histories.histories import positioned, row, signal, tick

DEPLOYMENT: Final = Deployment(60_000)
END_S: Final = 20_000
Change = tuple[float, str, str, str]  # seconds after START, from, to, trigger
_FIRST: Final = ("provisioned", "online", "signal")


@dataclass(frozen=True)
class Case:
    """Rows of a case, and the expected results.

    Attributes:
        rows: rows of its devices; rows of one instant are in the order of their arrival.
        want: expected transitions of each device up to ``until_s``.
        reboots: expected number of reboots, for devices that the case checks.
        listed: expected number of judgements other than transitions, by device and kind.
        until_s: end of the comparison, seconds after START.
    """

    rows: Sequence[Row]
    want: Mapping[str, Sequence[Change]]
    reboots: Mapping[str, int] = field(default_factory=dict[str, int])
    listed: Mapping[tuple[str, JudgementKind], int] = field(default_factory=dict[tuple[str, JudgementKind], int])
    until_s: float = 7_000


def policy() -> Row:
    """Return the policy of all cases.

    The timeout is two hours, and ten minutes for the class ``minute``.
    """
    content = parse_policy({"rules": {"timeout": "2h", "death_grace": "30s"}, "classes": {"minute": {"timeout": "10m"}}})
    return row(-2, "fleet/_/_/policy", policy=content.normalised(), effective_from_s=-1000)


def _minute(device: str) -> Row:
    return row(-1, f"{device}/registry", op="add", **{"class": "minute"})


def _online(at_s: float) -> Change:
    return (at_s, *_FIRST)


def _each_minute(device: str, minutes: int, ahead_s: float, begin_s: float = 0) -> list[Row]:
    return [signal(begin_s + 60 * number + ahead_s, device, received_s=begin_s + 60 * number) for number in range(minutes)]


def _boot_clock(device: str, minutes: int) -> list[Row]:
    return [row(60 * number, f"{device}/heartbeat", ts=60_000 * number) for number in range(minutes)]


def _reconnects(device: str, at_s: float, behind_s: float) -> list[Row]:
    return [row(at_s, f"{device}/death"), signal(at_s - behind_s, device, "birth", received_s=at_s + 0.05)]


def _wills() -> dict[str, Case]:
    return {
        "a birth that was built before the will": Case(
            [signal(60, "w1", "birth"), *_reconnects("w1", 300, 0.05), signal(2100, "w1")], {"w1": [_online(60)]}
        ),
        "a clock in whole seconds": Case(
            [signal(0, "w2"), row(600.4, "w2/death"), signal(600, "w2", "birth", received_s=600.9), signal(4200, "w2")],
            {"w2": [_online(0)]},
        ),
        "a clock that is behind": Case(
            [signal(0, "w3"), row(600, "w3/death"), signal(599, "w3", "birth", received_s=602)], {"w3": [_online(0)]}
        ),
        "will and birth of one instant": Case(
            [signal(0, "w4"), row(600, "w4/death"), row(600, "w4/birth")], {"w4": [_online(0)]}
        ),
        "birth and will of one instant": Case(
            [signal(0, "w5"), row(600, "w5/birth"), row(600, "w5/death")],
            {"w5": [_online(0), (630, "online", "offline", "death")]},
        ),
        "many reconnects at once": Case(
            [*(signal(0, f"w6-{number}") for number in range(20)),
             *(one for number in range(20) for one in _reconnects(f"w6-{number}", 900 + number / 100, 0.02))],
            {f"w6-{number}": [_online(0)] for number in range(20)},
        ),
        "a will and nothing more": Case(
            [signal(0, "w7"), row(300, "w7/death")], {"w7": [_online(0), (330, "online", "offline", "death")]}
        ),
        "data from before the will, long after it": Case(
            [signal(0, "w8", gateway="g"), row(660, "w8/death"), signal(180, "w8", "telemetry", received_s=720, gateway="g")],
            {"w8": [_online(0), (690, "online", "offline", "death")]},
        ),
        "data from before the will, just after it": Case(
            [signal(0, "w9", gateway="g"), row(660, "w9/death"), signal(650, "w9", "telemetry", received_s=680, gateway="g")],
            {"w9": [_online(0), (690, "online", "offline", "death")]},
        ),
        "a return that the broker delivers when the bridge is back": Case(
            [signal(0, "fleet/away/w10"), row(660, "fleet/_/east/gap", op="open", from_s=600, sites=["away"]),
             row(660.2, "fleet/away/w10/death"), signal(630, "fleet/away/w10", "birth", received_s=660.3),
             row(661, "fleet/_/east/gap", op="close", until_s=661)],
            {"w10": [_online(0)]},
        ),
    }  # fmt: skip


def _shards() -> dict[str, Case]:
    deaf = row(3_600, "fleet/_/north/gap", op="open", from_s=3_590, sites=["oslo", "turku"])
    return {
        "a bridge that does not listen holds back its own sites alone": Case(
            [signal(0, "fleet/oslo/x1"), signal(0, "fleet/rome/x2"), deaf, signal(8_000, "fleet/rome/x3")],
            {"x1": [_online(0)], "x2": [_online(0), (7_200, "online", "offline", "silence")], "x3": [_online(8_000)]},
            until_s=15_000,
        ),
    }


def _clocks() -> dict[str, Case]:
    hour = 60
    rtc = row(0, "c5/birth", ts=946_684_805_000)
    backlog = [signal(600 + 60 * number, "c7", received_s=7800) for number in range(1, 120)]
    drained = [signal(600 + 60 * number, "c8", received_s=8400 + 60 * number) for number in range(1, 60)]
    return {
        "ten minutes ahead": Case([_minute("c1"), *_each_minute("c1", hour, 600)], {"c1": [_online(0)]}, until_s=3600),
        "it counts from its start": Case([_minute("c2"), *_boot_clock("c2", hour)], {"c2": [_online(0)]}, until_s=3600),
        "two minutes behind": Case([_minute("c3"), *_each_minute("c3", hour, -120, 300)], {"c3": [_online(300)]}, until_s=3600),
        "not set at its start, then right": Case(
            [_minute("c4"), *_boot_clock("c4", 3), *_each_minute("c4", hour, 0, 180)], {"c4": [_online(0)]}, until_s=3600
        ),
        "the default of a real-time clock, then right": Case(
            [_minute("c5"), rtc, *_each_minute("c5", hour, 0, 60)], {"c5": [_online(0)]}, until_s=3600
        ),
        "1,024 weeks back": Case(
            [_minute("c6"), *(signal(300 * n - 1024 * 604_800, "c6", received_s=300 * n) for n in range(12))],
            {"c6": [_online(0)]},
            until_s=3600,
        ),
        "a backlog at once": Case(
            [_minute("c7"), *_each_minute("c7", 11, 0), *backlog, signal(7800.5, "c7")],
            {"c7": [_online(0), (1200, "online", "offline", "silence"), (7800, "offline", "online", "signal")]},
            until_s=8000,
        ),
        "a backlog that is sent slowly": Case(
            [_minute("c8"), *_each_minute("c8", 11, 0), *drained],
            {"c8": [_online(0), (1200, "online", "offline", "silence"), (8460, "offline", "online", "signal")]},
            until_s=12_000,
        ),
    }


def _counters() -> dict[str, Case]:
    def counted(device: str, **more: Any) -> list[Row]:
        return [signal(number, device, seq=number % 256, **more) for number in range(1024)]

    stepped = [*(signal(at, "s3", boot="b", seq=at) for at in range(5)),
               *(signal(at - 3, "s3", boot="b", seq=at, received_s=at) for at in range(5, 10))]  # fmt: skip
    plain = [*(signal(at, "s4", seq=at) for at in range(5)),
             *(signal(at - 3.5, "s4", seq=at, received_s=at) for at in range(5, 10))]  # fmt: skip
    sessions = [row(0, "s5/birth", session="a"), row(600, "s5/birth", session="b"), row(601, "s5/death", session="a")]
    restart = [*(signal(at, "s6", seq=at + 100) for at in range(5)), *(signal(at, "s6", seq=at) for at in range(10, 15))]
    return {
        "a counter that wraps, one boot": Case(counted("s1", boot="b"), {"s1": [_online(0)]}, {"s1": 0}),
        "a counter that wraps, no boot": Case(counted("s2"), {"s2": [_online(0)]}, {"s2": 0}),
        "a clock that steps back, one boot": Case(stepped, {"s3": [_online(0)]}, {"s3": 0}),
        "a clock that steps back, no boot": Case(plain, {"s4": [_online(0)]}, {"s4": 0}),
        "the will of an older session": Case(sessions, {"s5": [_online(0)]}),
        "a counter that begins anew": Case(restart, {"s6": [_online(0)]}, {"s6": 1}),
    }


def _redelivered() -> dict[str, Case]:
    """Return births that a broker delivers after the birth of a newer session, again or for the first time.

    Each case ends with the valid will of its newest session; only the last case ends with an older will.
    """

    def birth(device: str, at_s: float, session: str, seq: int, lead_s: float, late_s: float = 0, boot: str = "b") -> Row:
        return signal(at_s + lead_s, device, "birth", received_s=at_s + late_s, boot=boot, seq=seq, session=session)

    def unset(device: str, at_s: float, session: str, seq: int) -> Row:
        return row(at_s, f"{device}/birth", ts=5, boot="b", seq=seq, session=session)

    def dies(device: str, session: str) -> Row:
        return row(720, f"{device}/death", session=session)

    def three(device: str, lead_s: float) -> list[Row]:
        """Return three births, then the first two again, and the will of the third."""
        times = ((100, "x", 1), (400, "y", 4), (600, "z", 9))
        again = [birth(device, at_s, session, seq, lead_s, 603 - at_s) for at_s, session, seq in times[:2]]
        return [*(birth(device, *one, lead_s) for one in times), *again, dies(device, "z")]

    dead = (750, "online", "offline", "death")
    anew = [birth("r5", 100, "x", 0, 3_600), signal(4_000, "r5", received_s=400, boot="b", seq=7),
            birth("r5", 600, "y", 0, 3_600), dies("r5", "y")]  # fmt: skip
    reset = [birth("r6", 100, "x", 90, 3_600, boot="7"), birth("r6", 600, "y", 0, 3_000, boot="1"), dies("r6", "y")]
    wraps = [birth("r7", 100, "x", 254, 3_600), birth("r7", 600, "y", 2, 3_600), dies("r7", "y")]
    behind = [birth("r8", 600, "x", 1, 0, 4), birth("r8", 601, "y", 2, 0), dies("r8", "y")]
    old_will = [*three("r9", 3_600)[:-1], dies("r9", "y")]
    return {
        "older births again, the clock an hour ahead": Case(three("r1", 3_600), {"r1": [_online(100), dead]}),
        "older births again, the clock an hour behind": Case(three("r2", -3_600), {"r2": [_online(100), dead]}),
        "older births again, the clock three months behind": Case(three("r3", -8_000_000), {"r3": [_online(100), dead]}),
        "an older birth again, the clock not set": Case(
            [unset("r4", 100, "x", 1), unset("r4", 600, "y", 2), unset("r4", 603, "x", 1), dies("r4", "y")],
            {"r4": [_online(100), dead]},
        ),
        "a counter that begins anew with each connection": Case(anew, {"r5": [_online(100), dead]}),
        "a device that loses boot and counter": Case(reset, {"r6": [_online(100), dead]}, {"r6": 1}),
        "a counter that wraps with the reconnect": Case(wraps, {"r7": [_online(100), dead]}),
        "an older birth behind a newer one, the clock right": Case(behind, {"r8": [_online(600), dead]}),
        "the will of a session whose birth came again": Case(old_will, {"r9": [_online(100)]}),
    }


def _behind(device: str, gateway: str, hours: int) -> list[Row]:
    """Return the signals of an hourly sensor behind a gateway, on the hour."""
    return [signal(3600 * hour, device, gateway=gateway) for hour in range(hours)]


def _dies(gateway: str, at_s: float, **more: Any) -> Row:
    return row(at_s, f"{gateway}/death", gateway=gateway, **more)


def _gateways() -> dict[str, Case]:
    def born(gateway: str, at_s: float, ts_s: float | None = None, **more: Any) -> Row:
        return signal(at_s if ts_s is None else ts_s, gateway, "birth", received_s=at_s, gateway=gateway, **more)

    blips = [one for number in range(12) for one in (_dies("gw2", 1200 * number + 600), born("gw2", 1200 * number + 610))]
    renewed = [born("gw4", 0, session="1"), signal(1, "g4", "birth", gateway="gw4"),
               born("gw4", 600, session="2"), signal(600.1, "g4", "birth", gateway="gw4"),
               _dies("gw4", 601, session="1")]  # fmt: skip
    behind = [born("gw5", 0), signal(1, "g5", "birth", gateway="gw5"), _dies("gw5", 600),
              born("gw5", 601, 599), signal(599.1, "g5", "birth", received_s=601.1, gateway="gw5")]  # fmt: skip
    again = [born("gw6", 0, boot="p", seq=1, session="1"), signal(1, "g6", "birth", gateway="gw6"),
             born("gw6", 600, boot="p", seq=9, session="2"), born("gw6", 601, 0, boot="p", seq=1, session="1")]  # fmt: skip
    return {
        "a gateway's blip": Case([*_behind("g1", "gw1", 2), _dies("gw1", 600), born("gw1", 610)], {"g1": [_online(0)]}),
        "a gateway's blip every twenty minutes": Case(
            [*(one for number in range(20) for one in _behind(f"g2-{number}", "gw2", 4)), *blips],
            {f"g2-{number}": [_online(0)] for number in range(20)},
            until_s=14_000,
        ),
        "a gateway that is dead for half an hour": Case(
            [*_behind("g3", "gw3", 2), _dies("gw3", 600), born("gw3", 2400)],
            {"g3": [_online(0), (630, "online", "unreachable", "gateway_death"),
                    (2400, "unreachable", "online", "gateway_return")]},
        ),
        "a node's death of an older session": Case(renewed, {"gw4": [_online(0)], "g4": [_online(1)]}),
        "a node's birth that is delivered again": Case(
            [*again, _dies("gw6", 602, session="1")], {"gw6": [_online(0)], "g6": [_online(1)]}
        ),
        "a node's clock that is behind when it returns": Case(behind, {"gw5": [_online(0)], "g5": [_online(1)]}),
    }  # fmt: skip


def _identities() -> dict[str, Case]:
    def speak(device: str, *sites: tuple[float, str]) -> list[Row]:
        return [row(at_s, f"fleet/{site}/{device}/heartbeat", boot=site) for at_s, site in sites]

    in_turn = [(300 * number, ("oslo", "rome")[number % 2]) for number in range(20)]
    conflict = JudgementKind.IDENTITY_CONFLICT
    return {
        "one id speaks from two sites": Case(
            speak("i1", *in_turn), {"i1": [_online(0)]}, {"i1": 0}, {("i1", conflict): 1}, until_s=6_000
        ),
        "a device that is moved": Case(
            speak("i2", (0, "oslo"), (300, "rome"), (600, "rome")), {"i2": [_online(0)]}, {"i2": 0}, {("i2", conflict): 0}
        ),
        "a device that another takes over": Case(
            [*speak("i3", (0, "oslo"), (300, "rome")), row(400, "fleet/rome/i3/registry", op="add"), *speak("i3", (600, "oslo"))],
            {"i3": [_online(0)]},
            listed={("i3", conflict): 0},
        ),
    }


def _operators() -> dict[str, Case]:
    def add(device: str, **limits: int) -> Row:
        return row(-1, f"{device}/registry", op="add", **limits)

    def update(device: str) -> Row:
        return row(100, f"{device}/control", op="update", until_s=7_300)

    updating = (100, "online", "updating", "update")
    naps = [one for hour in range(2) for one in (signal(3600 * hour, "o5"), row(3600 * hour + 20, "o5/death"))]
    return {
        "an update that ends with other firmware": Case(
            [signal(0, "o1", firmware="1.0"), update("o1"), signal(280, "o1", "birth", firmware="1.1")],
            {"o1": [_online(0), updating, (280, "updating", "online", "updated")]},
        ),
        "an update that ends with another boot": Case(
            [signal(0, "o2", boot="a"), update("o2"), signal(280, "o2", "birth", boot="b")],
            {"o2": [_online(0), updating, (280, "updating", "online", "updated")]},
        ),
        "an update while the old firmware still speaks": Case(
            [signal(0, "o3", firmware="1.0"), update("o3"), signal(280, "o3", firmware="1.0")],
            {"o3": [_online(0), updating]},
        ),
        "an update that is released": Case(
            [signal(0, "o4"), update("o4"), row(200, "o4/control", op="release")],
            {"o4": [_online(0), updating, (200, "updating", "online", "released")]},
        ),
        "an hourly sleeper with a will": Case([add("o5", death_grace_ms=3_900_000), *naps], {"o5": [_online(0)]}),
        "registered and never heard": Case([add("o6", timeout_ms=600_000)], {"o6": [(599, "provisioned", "offline", "silence")]}),
        "a timeout of its own": Case(
            [add("o7", timeout_ms=300_000), signal(0, "o7")], {"o7": [_online(0), (300, "online", "offline", "silence")]}
        ),
        "a limit beyond the policy's bounds": Case(
            [add("o8", timeout_ms=1), signal(0, "o8")], {"o8": [_online(0)]}, listed={("o8", JudgementKind.REFUSED): 1}
        ),
    }


CASES: Final[Mapping[str, Case]] = {
    **_wills(), **_shards(), **_clocks(), **_counters(), **_redelivered(), **_gateways(), **_identities(), **_operators()
}  # fmt: skip


def rows_of(cases: Sequence[Case]) -> list[Row]:
    """Return the rows of cases as one history, after the policy and before a tick."""
    return positioned([policy(), *(one for case in cases for one in case.rows), tick(END_S)])
