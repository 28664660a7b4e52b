"""Who makes generations and snapshots, and who maintains: one at a time, since each relies on what the others may remove."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.home import Home
from fleetpulse.io.locks import held, holder

MAINTAIN_LOCK: Final = "maintain.lock"
_PATIENCE_S: Final = 600.0


class _Busy(Exception):
    """Another holds it."""


@contextmanager
def making(home: Home, by: str, say: Callable[[str], None]) -> Iterator[None]:
    """Make a generation or a snapshot: alone, and while nothing is maintained; who comes second waits ten minutes.

    Args:
        home: the home.
        by: who, in words.
        say: told what is waited for.

    Raises:
        FleetError: another still does.
    """
    home.lifecycle.mkdir(parents=True, exist_ok=True)
    limit, told = time.monotonic() + _PATIENCE_S, False
    with ExitStack() as locks:
        for path in (_making(home), home.path / MAINTAIN_LOCK):
            while True:
                try:
                    locks.enter_context(held(path, by, _Busy))
                    break
                except _Busy as other:
                    if time.monotonic() > limit:
                        raise FleetError(
                            f"{other} is still at work after {_PATIENCE_S:.0f} s; let it end, and try again"
                        ) from None
                    if not told:
                        say(f"waiting for {other}")
                        told = True
                time.sleep(0.5)
        yield


def is_making(home: Home) -> bool:
    """Whether somebody makes a generation or a snapshot now; what is half made and nobody's is left over."""
    return holder(_making(home)) is not None


def _making(home: Home) -> Path:
    return home.lifecycle / "making"
