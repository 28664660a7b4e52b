"""Benchmark of the HTTP server: the page and the API of a large fleet, with viewers and new commits.

Rule 1: the server runs as typed, ``fleet serve``, in a process of its own. Viewers are threads of this process; each
follows addresses that people open, at a fixed pace, whether or not earlier answers were slow.
Rule 2: meanwhile each second commits transitions, which the server folds.
Rule 3: the latency of a request is that of the whole answer, from this process. Errors end the benchmark.
"""

import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles
from threading import Event, Thread
from typing import Any, Final
from urllib.parse import quote

import psutil

from bench.folders import own_folder
from bench.large_home import ID, add_transitions, generate
from bench.measure import read, resident_bytes
from bench.page.paint import paints
from cli.dev.test_run import calibrate
from fleetpulse.core.errors import FleetError
from fleetpulse.core.times import DAY_MS
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.ports import free_port
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.web.access import WebRole, grant_token

_HOST: Final = "127.0.0.1"
_START_S: Final = 300.0
_REQUEST_S: Final = 60.0
_MESSAGES: Final = 3  # of a device, in each history
_CHANGES: Final = 50  # transitions a second
_PACE_S: Final = 1.0  # interval between the requests of a viewer
_PATHS: Final = {  # route -> addresses with places for a device, a site and a search
    "/": ("/",),
    "/devices": ("/devices", "/devices?mode=offline&sort=-since", "/devices?site={site}", "/devices?class=class-3&sort=device"),
    "/devices?q=": ("/devices?q={text}",),
    "/devices/ID": ("/devices/{device}",),
    "/changes": ("/changes?last=60", "/changes?last=60&site={site}"),
    "/stream": ("/stream",),
    "/api/v1/fleet": ("/api/v1/fleet",),
    "/api/v1/devices": ("/api/v1/devices?mode=offline", "/api/v1/devices?q={text}", "/api/v1/devices?sort=device"),
    "/api/v1/transitions": ("/api/v1/transitions?last=60",),
    "/metrics": ("/metrics",),
}

_PAINTED: Final = {
    "/": "/", "/devices": "/devices", "/devices?q=": "/devices?q=00012", "/devices/ID": f"/devices/{ID}", "/changes": "/changes",
    "/stream": "/stream",
}  # fmt: skip


def bench_page(
    devices: int, histories: list[int], days: int, viewers: int, for_s: float, report: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Measure the server over each history; yield a row for each route, and one for the process.

    Args:
        devices: number of devices.
        histories: lengths of history, as multiples of about 4.5 transitions a device.
        days: days that each history covers.
        viewers: number of viewers.
        for_s: duration of the load, seconds.
        report: callback for progress.

    Raises:
        FleetError: the server failed, or answered with an error.
    """
    unit_s = calibrate()
    for history in histories:
        with own_folder(Path(tempfile.mkdtemp(prefix="fleet-page-"))) as place:
            report(f"generating {devices:,} devices, history x{history} over {days} days")
            home = Home(place / "home")
            transitions, _ = generate(home, devices, history, _MESSAGES, days * DAY_MS)
            subprocess.run(
                [sys.executable, "-m", "cli", "maintain", "--home", str(home.path)], check=True, stdout=subprocess.DEVNULL,
                timeout=1_800,
            )  # fmt: skip
            same = {"devices": devices, "transitions": transitions, "days": days, "unit_s": round(unit_s, 2)}
            token = grant_token(home, "bench", WebRole.VIEWER, wall_clock_ms())
            with _served(home) as (server, port, start_s):
                yield from (
                    {**same, **row}
                    for row in _measured(home, server, port, token, devices, days * DAY_MS, viewers, for_s, report)
                )
                report("largest paints in Chromium")
                yield from ({**same, **row} for row in paints(f"http://{_HOST}:{port}", token, _PAINTED))
                yield {**same, "route": "start until ready", "p50_s": round(start_s, 2)}


@contextmanager
def _served(home: Home) -> Iterator[tuple[psutil.Process, int, float]]:
    """Run the server; yield its process, its port, and the seconds until it was ready."""

    def refused(why: str) -> FleetError:
        return FleetError(f"no port is free for the server ({why}); end other servers", code="port-in-use")

    port = free_port(_HOST, 0, refused)
    log = home.path.parent / "serve.log"
    with log.open("wb") as out:
        began_s = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "cli", "serve", "--home", str(home.path), "--port", str(port)],
            stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            while _status(port, "/readyz") != 200:
                if process.poll() is not None or time.monotonic() - began_s > _START_S:
                    raise FleetError(f'the server is not ready: see "{log}"', code="bench-run-failed")
                time.sleep(0.05)
            yield psutil.Process(process.pid), port, time.monotonic() - began_s
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _status(port: int, path: str) -> int:
    connection = http.client.HTTPConnection(_HOST, port, timeout=_REQUEST_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def _measured(
    home: Home,
    server: psutil.Process,
    port: int,
    token: str,
    devices: int,
    span_ms: int,
    viewers: int,
    for_s: float,
    report: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    report("idle: nobody looks")
    time.sleep(25.0)  # the server refreshes for some seconds after the newest request
    before = read(server)
    time.sleep(30.0)
    idle = read(server)
    report(f"{viewers} viewers for {for_s:g} s, {_CHANGES} transitions a second")
    found: dict[str, list[float]] = defaultdict(list)
    faults: list[str] = []
    ended = Event()
    threads = [
        Thread(target=_view, args=(port, token, devices, number, viewers, ended, found, faults), daemon=True)
        for number in range(viewers)
    ]
    for thread in threads:
        thread.start()
    loaded, peak_bytes, number = read(server), 0, 0
    while time.monotonic() - loaded.wall_s < for_s and not faults:
        number += 1
        add_transitions(home, number, _CHANGES, devices, span_ms)
        peak_bytes = max(peak_bytes, resident_bytes(server))
        time.sleep(1.0)
    ended.set()
    done = read(server)
    for thread in threads:
        thread.join(_REQUEST_S)
    if faults:
        raise FleetError(f"a request failed: {faults[0]}", code="bench-run-failed")
    for route, taken in found.items():
        cuts = quantiles(taken, n=100, method="inclusive")
        yield {"route": route, "requests": len(taken), **{f"p{p}_s": round(cuts[p - 1], 3) for p in (50, 95, 99)}}
    yield {
        "route": f"process, {viewers} viewers", "requests": sum(map(len, found.values())),
        "cores": round((done.cpu_s - loaded.cpu_s) / (done.wall_s - loaded.wall_s), 3), "peak_mb": round(peak_bytes / 1e6),
    }  # fmt: skip
    yield {"route": "process, nobody looks", "cores": round((idle.cpu_s - before.cpu_s) / (idle.wall_s - before.wall_s), 4)}


def _view(
    port: int,
    token: str,
    devices: int,
    number: int,
    viewers: int,
    ended: Event,
    found: dict[str, list[float]],
    faults: list[str],
) -> None:
    """Request addresses until the end, and add the seconds of each by route."""
    drawn = random.Random(number)
    connection = http.client.HTTPConnection(_HOST, port, timeout=_REQUEST_S)
    due_s = time.monotonic() + number * _PACE_S / viewers
    while not ended.wait(max(0.0, due_s - time.monotonic())):
        due_s += _PACE_S
        route = drawn.choice(list(_PATHS))
        device = f"pump-{drawn.randrange(devices):07d}"
        path = drawn.choice(_PATHS[route]).format(
            device=quote(device, safe=""), site=f"site-{drawn.randrange(500):03d}", text=device[5 : drawn.randrange(8, 12)]
        )
        began_s = time.monotonic()
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            content = answer.read()
        except OSError as error:
            faults.append(f"{path}: {error}")
            return
        if answer.status != 200:
            faults.append(f"{path}: {answer.status} {_text(content)}")
            return
        found[route].append(time.monotonic() - began_s)
    connection.close()


def _text(content: bytes) -> str:
    try:
        return json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace")
