"""Readiness of the server: ``/readyz`` answers 200 if the facts of the fleet can be read and are fresh.

Rule 1: readiness is about this server only. A stopped or stale lifecycle job is no reason to take the server away from its
users, who need it then; the metrics and the page report it.
Rule 2: the route is open, so its answer has no path of the home, and its requests hold at most `MOST_WAITING` threads.
"""

from typing import Final

from anyio.to_thread import run_sync
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fleetpulse.web.live import STALE_S, LiveFleet

WAIT_S: Final = 2.0  # for the refresh that a request after a pause starts
MOST_WAITING: Final = 4  # requests that wait in a thread; others wait without one


async def answer(request: Request) -> Response:
    """Answer 200 if the facts are fresh, otherwise 503 with the reason."""
    live: LiveFleet = request.app.state.live
    if await run_sync(live.await_fresh, WAIT_S, limiter=request.app.state.waiting):
        return JSONResponse({"status": "ready"})
    code, text = fault_of(live)
    return JSONResponse({"error": {"code": code, "message": text}}, 503)


def fault_of(live: LiveFleet) -> tuple[str, str]:
    """Return the code and the sentence of the reason why the facts are not fresh."""
    why = f" ({live.fault.replace(str(live.home.path), 'HOME')})" if live.fault else ""
    if live.age_s == float("inf"):
        return "facts-not-loaded", f"the facts of the fleet are not loaded yet{why}; try again later"
    text = (
        f"the facts of the fleet were read {live.age_s:,.0f} s ago, and the newest refresh must have succeeded within "
        f"{STALE_S:,.0f} s{why}; check the tables of the home with: ./fleet status"
    )
    return "facts-stale", text
