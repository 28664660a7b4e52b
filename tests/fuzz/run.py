"""The long form of fuzzing: ``./fleet test fuzz``, a million inputs made in three ways.

Rule 1: made by Hypothesis from what messages are made of; mutated at random from those; led by coverage, by atheris.
Rule 2: where that cannot be had, it is said, and the mutations take its share.
Rule 3: the first input that breaks a law ends it, is shown, and the exit code is 1.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random, SystemRandom
from typing import Any, Final

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st

from fleetpulse.paths import ROOT
from tests.fuzz.inputs import messages, mutated, packet_seeds, seeds
from tests.fuzz.laws import Accounts

_GENERATED, _GUIDED = 0.02, 0.5  # shares; the rest is mutated
_PACKETS: Final = 0.3  # share of raw bytes from a line in each of the other two
_WHOLE: Final = 0.5  # beyond it the topic stays as it is, or few would get past it
_POOL: Final = 20_000
_A_LIST: Final = 25  # messages that Hypothesis makes at once


def generated(accounts: Accounts, count: int, seed: int) -> list[bytes]:
    """Check messages that Hypothesis makes; return some of them."""
    pool: list[bytes] = []
    suppressed: list[HealthCheck] = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]

    @with_seed(seed)
    @settings(max_examples=10**9, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=suppressed)
    @given(st.lists(messages, min_size=_A_LIST, max_size=_A_LIST))
    def each(several: list[bytes]) -> None:
        if accounts.inputs >= count:
            raise _Enough
        for data in several:
            accounts.message(data)
        if len(pool) < _POOL:
            pool.extend(several)

    try:
        each()
    except _Enough:
        pass
    accounts.land()
    return pool


class _Enough(BaseException):
    """So many inputs as were asked for: no failure, which Hypothesis would try to make smaller."""


def mutations(accounts: Accounts, count: int, pool: list[bytes], random: Random) -> None:
    """Check mutations of messages, and of bytes from a line."""
    lines, last = packet_seeds(), b""
    try:
        while accounts.inputs < count:
            drawn = random.random()
            begin = lines if drawn < _PACKETS else pool
            one, other = random.choice(begin), random.choice(begin)
            if drawn > _WHOLE:
                topic, _, payload = one.partition(b"\n")
                last = topic + b"\n" + mutated(payload, other.partition(b"\n")[2], random)
            else:
                last = mutated(one, other, random)
            (accounts.packets if drawn < _PACKETS else accounts.message)(last)
        accounts.land()
    except BaseException:
        print(f"the input was {last!r}", file=sys.stderr)
        raise


def guided(way: str, count: int, seed: int, folder: Path, seconds: float) -> dict[str, Any]:
    """Let atheris make inputs; return the counts.

    Raises:
        SystemExit: one broke a law, or it took too long; libFuzzer's own words are above.
    """
    command = [sys.executable, "-P", "-m", "tests.fuzz.guided", way, str(count), str(seed), str(folder)]
    log = folder / f"{way}.log"
    with log.open("wb") as file:
        try:
            code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, timeout=seconds, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
            file.write(f"{count:,} inputs took longer than {seconds:.0f} s; give more time by --seconds\n".encode())
    said = folder / f"{way}.json"
    if code or not said.exists():
        print(log.read_text(errors="backslashreplace")[-6_000:], file=sys.stderr)
        for broken in sorted(folder.glob("broken-*")):
            print(f"the input was {broken.read_bytes()!r}", file=sys.stderr)
        raise SystemExit(1)
    return json.loads(said.read_text())


def _timed(name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    began = time.monotonic()
    said = run()
    took_s = time.monotonic() - began
    each_us = 1e6 * took_s / max(1, said["inputs"])
    print(f"{name}: {said['inputs']:,} inputs in {took_s:.0f} s, {each_us:.0f} us each", flush=True)
    return said


def main(inputs: int, seed: int, seconds: float) -> None:
    """Do it, and say what became of the inputs."""
    print(f"seed {seed}: the same inputs with --seed {seed}", flush=True)
    led = importlib.util.find_spec("atheris") is not None
    if not led:
        print("led by coverage: skipped, atheris is not here: it has wheels for Linux on x86-64 and Python 3.11 to 3.13")
    counts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fleet-fuzz-") as name:
        folder = Path(name)
        first, second = Accounts(), Accounts()
        pool = seeds()

        def made() -> dict[str, Any]:
            pool.extend(generated(first, int(inputs * _GENERATED), seed))
            return first.said()

        def changed() -> dict[str, Any]:
            share = 1 - _GENERATED - (_GUIDED if led else 0)
            mutations(second, round(inputs * share), pool, Random(seed))
            return second.said()

        counts += [_timed("made by Hypothesis", made), _timed("mutated", changed)]
        for way, share in (("messages", 1 - _PACKETS), ("packets", _PACKETS)) if led else ():
            count = round(inputs * _GUIDED * share)
            counts.append(_timed(f"{way} led by coverage", lambda w=way, c=count: guided(w, c, seed or 1, folder, seconds)))
    became = sum((Counter(one["became"]) for one in counts), Counter[str]())
    print(f"{sum(one['inputs'] for one in counts):,} inputs, no law broken; what they became (a message once with, once")
    print("without a mapping): " + ", ".join(f"{count:,} {what}" for what, count in became.most_common()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="fleet test fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="how many; a million if not said")
    parser.add_argument("--seed", type=int, default=None, help="of all that is drawn; printed if not given")
    parser.add_argument("--seconds", type=float, default=3_600, help="the longest that a part led by coverage may take")
    asked = parser.parse_args()
    main(asked.inputs, SystemRandom().randrange(1, 2**31) if asked.seed is None else asked.seed, asked.seconds)
