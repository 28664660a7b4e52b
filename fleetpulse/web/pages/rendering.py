"""Rendering of pages: templates, static files, the freshness of the facts, and addresses.

Rule 1: every value in a page is escaped by Jinja2. No page has inline scripts or style attributes: the content
security policy of `app` forbids them.
Rule 2: a static file has the digest of its content in its address, so browsers keep it for a year.
Rule 3: the state of the facts (`Freshness`) is that of the lifecycle job and of the refresh, not of the browser.
"""

import gzip
import json
import mimetypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from hashlib import sha256
from importlib.resources import files
from typing import Any, Final
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from fleetpulse.core.lifecycle import Mode, Trigger
from fleetpulse.core.times import format_duration, format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import in_use
from fleetpulse.io.system.process import status_age_s
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.reports.present.mirror import Reached
from fleetpulse.reports.present.parts import UNJUDGED
from fleetpulse.web.actions import airflow_of
from fleetpulse.web.live import STALE_S, LiveFleet
from fleetpulse.web.readings import one_a_core, sharing

STATIC: Final = "/static/"
_KEPT: Final = "public, max-age=31536000, immutable"
_JOB_S: Final = 10.0  # the lifecycle job writes its status each second; older than this, it does not run
_BEHIND_MS: Final = 120_000  # beyond the allowed lateness
_FOR_PROGRAMS: Final = ("/api", "/metrics", "/healthz", "/readyz")
_DOTS: Final = frozenset({".", "..", "-"})  # ids that a path cannot have: browsers remove dots
_UNITS: Final = ((365 * 86_400, "y"), (86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
NAVIGATION: Final = (  # of the header: name, path
    ("Fleet", "/"), ("Devices", "/devices"), ("Changes", "/changes"), ("Streams", "/stream"), ("State", "/state"),
    ("Quality", "/quality"), ("Backtest", "/backtest"),
)  # fmt: skip
LETTERS: Final = {  # mode -> letter of its badge
    Mode.ONLINE: "O", Mode.DEGRADED: "D", Mode.FLAGGED: "F", Mode.OFFLINE: "X", Mode.UNREACHABLE: "R", Mode.MAINTENANCE: "M",
    Mode.UPDATING: "U", Mode.PROVISIONED: "P", Mode.DECOMMISSIONED: "C", Mode.FORGOTTEN: "G", UNJUDGED: "?",
}  # fmt: skip
MEANINGS: Final = {  # mode -> sentence for the reader of a page
    Mode.ONLINE: "Heard within its timeout.",
    Mode.DEGRADED: "Heard within its timeout, with too many errors.",
    Mode.FLAGGED: "Heard within its timeout; its errors match the sequence of an attack.",
    Mode.OFFLINE: "Not heard within its timeout, or its connection died and the grace period is over.",
    Mode.UNREACHABLE: "Its gateway is dead, so its own state is unknown.",
    Mode.MAINTENANCE: "Silence is expected until an announced instant: maintenance.",
    Mode.UPDATING: "Silence is expected until an announced instant: firmware update.",
    Mode.PROVISIONED: "Registered; no signal has been judged yet.",
    Mode.DECOMMISSIONED: "Taken out of service: counted, not judged.",
    Mode.FORGOTTEN: "Silent or decommissioned for so long that its state is removed.",
    UNJUDGED: "Registered or heard, and not judged yet.",
}
TRIGGERS: Final = {  # trigger -> short description
    Trigger.SIGNAL: "a signal was received",
    Trigger.SILENCE: "no signal for the timeout",
    Trigger.DEATH: "the grace period after its will is over",
    Trigger.GATEWAY_DEATH: "the grace period after the will of its gateway is over",
    Trigger.GATEWAY_RETURN: "its gateway was heard again",
    Trigger.ERRORS: "too many errors within the window",
    Trigger.RECOVERED: "fewer errors than the limit are within the window",
    Trigger.SEQUENCE: "its errors match the sequence of an attack",
    Trigger.VELOCITY: "enough events in one session: held for review",
    Trigger.RELEASED: "an operator released it",
    Trigger.HOLD_OVER: "flagged for the longest time that the policy allows",
    Trigger.SESSION_OVER: "its session ended while it was held for review",
    Trigger.MAINTAIN: "an operator started maintenance",
    Trigger.UPDATE: "an operator started an update",
    Trigger.UNTIL: "the announced end of maintenance or update",
    Trigger.UPDATED: "a restart or new firmware shows that the update is done",
    Trigger.REGISTERED: "a registry entry",
    Trigger.DECOMMISSION: "a registry entry takes it out of service",
    Trigger.FORGET: "silent or decommissioned for forget_after",
    Trigger.AMENDED: "an amendment",
}


@dataclass(frozen=True, slots=True)
class Freshness:
    """State of the facts on a page.

    Attributes:
        state: ``live``; ``behind`` if verdicts are older than expected; ``stale`` if no new ones can be shown;
            ``stopped`` if no fleet runs in the home.
        why: explanation for people; empty if live.
        frontier_ms: event time up to which the job has judged, epoch milliseconds; None before the first batch.
        now_ms: instant of the answer, epoch milliseconds.
        tag: version of the facts.
    """

    state: str
    why: str
    frontier_ms: int | None
    now_ms: int
    tag: str

    @property
    def behind_ms(self) -> int | None:
        """Distance of the frontier from the present, milliseconds; None before the first batch."""
        return None if self.frontier_ms is None else max(0, self.now_ms - self.frontier_ms)


def freshness(live: LiveFleet, reached: Reached, now_ms: int | None = None) -> Freshness:
    """Return the state of the facts.

    Args:
        live: facts in memory.
        reached: their version.
        now_ms: present instant, epoch milliseconds; None reads the clock.
    """
    at_ms = wall_clock_ms() if now_ms is None else now_ms
    state, why = _state(live, reached.frontier_ms, at_ms)
    return Freshness(state, why, reached.frontier_ms, at_ms, reached.tag)


def _state(live: LiveFleet, frontier_ms: int | None, at_ms: int) -> tuple[str, str]:
    if live.age_s > STALE_S:
        return "stale", f"The newest facts cannot be read: {live.fault or 'the refresh takes too long'}."
    age_s = status_age_s(live.home.run("lifecycle"), at_ms / 1000)
    if age_s is None or age_s > _JOB_S:
        if not in_use(live.home):
            return "stopped", "No fleet runs in this home: no message is judged."
        return "stale", "The lifecycle job does not report: verdicts are as of the instant shown."
    if frontier_ms is None:
        return "behind", "Nothing is judged yet: the first batch is running."
    if at_ms - frontier_ms > _BEHIND_MS + live.home.deployment().allowed_lateness_ms:
        return "behind", "Verdicts are older than expected."
    return "live", ""


@dataclass(frozen=True, slots=True)
class _Static:
    content: bytes
    compressed: bytes
    media_type: str
    digest: str


@cache
def static_files() -> Mapping[str, _Static]:
    """Return the static files by name."""
    folder = files("fleetpulse.web") / "static"
    found = dict[str, _Static]()
    for prefix, place in (("", folder), ("vendor/", folder / "vendor")):
        for one in place.iterdir():
            if one.is_file() and one.name.endswith((".css", ".js", ".svg", ".txt")):
                content = one.read_bytes()
                media_type = mimetypes.guess_type(one.name)[0] or "application/octet-stream"
                found[prefix + one.name] = _Static(
                    content, gzip.compress(content, mtime=0), media_type, sha256(content).hexdigest()[:12]
                )
    return found


def static_address(name: str) -> str:
    """Return the path of a static file, with the digest of its content."""
    return f"{STATIC}{static_files()[name].digest}/{name}"


async def static_file(request: Request) -> Response:
    """Answer with a static file."""
    found = static_files().get(request.path_params["name"])
    if found is None:
        return error_page(request, 404, "not-found", "no such file")
    headers = {"Vary": "Accept-Encoding"}
    if request.path_params["digest"] == found.digest:
        headers["Cache-Control"] = _KEPT
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(found.compressed, media_type=found.media_type, headers={**headers, "Content-Encoding": "gzip"})
    return Response(found.content, media_type=found.media_type, headers=headers)


def query_of(parameters: Mapping[str, Any], **changed: Any) -> str:
    """Return ``?name=value`` for the parameters of an address, without empty ones; empty if none is left."""
    merged = {name: value for name, value in {**parameters, **changed}.items() if value not in (None, "", False)}
    return f"?{urlencode(merged, quote_via=quote)}" if merged else ""


def device_path(device_id: str, part: str = "", **parameters: Any) -> str:
    """Return the path of a device's page.

    Args:
        device_id: id of the device, any text.
        part: part of the page; empty for the whole page.
        parameters: parameters of the query.
    """
    named = device_id in _DOTS
    place = "-" if named else quote(device_id, safe="")
    return f"/devices/{place}{part and f'/{part}'}{query_of({'id': device_id} if named else {}, **parameters)}"


def device_of(request: Request) -> tuple[str, str]:
    """Return the device id and the part of a page that a request names, see `device_path`."""
    raw: bytes = request.scope.get("raw_path") or quote(request.scope["path"]).encode()
    path = raw.partition(b"?")[0].decode("latin-1")
    root = quote(request.scope.get("root_path", ""))
    place, _, part = path.removeprefix(root).removeprefix("/devices/").partition("/")
    from urllib.parse import unquote

    found = unquote(place)
    return (request.query_params.get("id", found) if found == "-" else found), part


def number(value: int | None) -> str:
    """Format a number with separators of thousands."""
    return "-" if value is None else f"{value:,}"


def signed(value: int) -> str:
    """Format a difference with its sign."""
    return f"+{value:,}" if value > 0 else f"−{-value:,}" if value < 0 else "±0"  # noqa: RUF001 - the sign is a minus


def coarse(span_ms: int) -> str:
    """Format a span with its greatest unit: ``11 min``, ``3 d``."""
    for seconds, unit in _UNITS:
        if abs(span_ms) >= seconds * 1000:
            return f"{abs(span_ms) // (seconds * 1000):,} {unit}"
    return "0 s"


def ago(instant_ms: int, now_ms: int) -> str:
    """Format the distance of an instant from the present."""
    return f"in {coarse(instant_ms - now_ms)}" if instant_ms > now_ms + 999 else f"{coarse(now_ms - instant_ms)} ago"


def clock(instant_ms: int, now_ms: int) -> str:
    """Format an instant in UTC, with its date if it is of another day than the present."""
    moment = datetime.fromtimestamp(instant_ms // 1000, UTC)
    today = datetime.fromtimestamp(now_ms // 1000, UTC)
    if moment.date() == today.date():
        return f"{moment:%H:%M:%S}"
    return f"{moment:%-d %b %H:%M:%S}" if moment.year == today.year else f"{moment:%Y-%m-%d %H:%M:%S}"


def compact(value: Any) -> str:
    """Format a value as JSON in one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@cache
def _environment() -> Environment:
    env = Environment(
        loader=PackageLoader("fleetpulse.web", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {
        "number": number, "signed": signed, "duration": format_duration, "instant": format_instant, "coarse": coarse,
        "compact": compact,
    }  # fmt: skip
    env.globals |= {
        "ago": ago, "clock": clock, "query_of": query_of, "device_path": device_path, "letters": LETTERS, "meanings": MEANINGS,
        "triggers": TRIGGERS, "navigation": NAVIGATION,
    }  # fmt: skip
    return env


def render(request: Request, template: str, context: Mapping[str, Any], status: int = 200) -> HTMLResponse:
    """Render a template.

    Args:
        request: request that is answered.
        template: name of the template.
        context: values of the template. Those of ``base.html`` that are absent: ``fresh`` is None, ``here`` is the
            path of the request.
        status: status of the answer.
    """
    root = request.scope.get("root_path", "")
    path = request.scope["path"].removeprefix(root)
    known: dict[str, Any] = {
        "root": root,
        "airflow": airflow_of(request),
        "here": path,
        "parameters": dict(request.query_params),
        "static": lambda name: root + static_address(name),
        "fresh": None,
        "now_ms": wall_clock_ms(),
    }
    return HTMLResponse(_environment().get_template(template).render({**known, **context}), status)


View = Callable[[LiveFleet, Request], Mapping[str, Any]]


def page(template: str, view: View, *, reads_tables: bool = False) -> Callable[[Request], Any]:
    """Return a route that renders a template with the context of a view and the freshness of the facts.

    Args:
        template: name of the template.
        view: function that returns the context; it runs in a thread.
        reads_tables: whether each request reads tables; then their number is limited, see `readings`.
    """

    async def route(request: Request) -> Response:
        render_ = partial(_rendered, request, template, view)
        if not reads_tables:
            return await run_in_threadpool(render_)
        await run_in_threadpool(request.app.state.live.reached)  # the first load of the facts must not occupy a core
        return await one_a_core(request, sharing(render_))

    return route


def _rendered(request: Request, template: str, view: View) -> Response:
    """Render a view; call it in a thread, so that others can be answered meanwhile."""
    live: LiveFleet = request.app.state.live
    fresh = freshness(live, live.reached())
    context = view(live, request)
    return render(request, template, {"fresh": fresh, "now_ms": fresh.now_ms, **context})


def is_for_people(request: Request) -> bool:
    """Whether the answer to a request is a page, see rule 3 of `app`."""
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    return not any(path == one or path.startswith(f"{one}/") for one in _FOR_PROGRAMS)


def error_page(request: Request, status: int, code: str, text: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return a page that shows an error. It has no facts of the fleet: the reader may have no right to see them."""
    answer = render(request, "error.html", {"code": code, "text": text, "status": status}, status)
    answer.headers.update(headers or {})
    return answer


def home_of(request: Request) -> Home:
    """Return the home that the application shows."""
    return request.app.state.home
