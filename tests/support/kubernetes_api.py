"""Kubernetes in one process, as far as Spark's scheduler uses it: an API server, and a kubelet.

The API server keeps objects in memory: create, get, list and watch with label and field selectors, patch, and
delete. It has no authentication and no schemas. The kubelet runs the first container of each pod as a local
process with the command, arguments and variables of the pod, and reports its phase.

Limits: volumes are not mounted, so the paths of a template must be paths of this machine. The files of a ConfigMap are
in the folder of the pod, and its command, arguments and variables have that folder in place of the mount's path.
Watches work by HTTP only: a request for a WebSocket gets an answer without one, after which Spark's client uses HTTP.
"""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self
from urllib.parse import parse_qs, urlsplit

import psutil

_STOP_S: Final = 20.0
_WATCH_S: Final = 1.0  # after which a watch notices the end of the server
_NODE: Final = "127.0.0.1"
Object = dict[str, Any]
Launcher = Callable[[Sequence[str], Path], Sequence[str]]


class Missing(Exception):
    """There is no such object."""


class Objects:
    """Objects of the API server, and the events of their changes."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.events: list[tuple[str, str, Object]] = []  # plural, type, object
        self._objects: dict[tuple[str, str, str], Object] = {}

    def __contains__(self, key: tuple[str, str, str]) -> bool:
        return key in self._objects

    def put(self, plural: str, namespace: str, found: Object) -> Object:
        """Add an object."""
        with self.changed:
            meta = found["metadata"]
            number = len(self.events) + 1
            meta |= {"namespace": namespace, "uid": f"uid-{number}"}
            meta["creationTimestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self._objects[plural, namespace, meta["name"]] = found
            return self._announce(plural, "ADDED", found)

    def get(self, plural: str, namespace: str, name: str) -> Object:
        """Return a copy of an object.

        Raises:
            Missing: there is no such object.
        """
        with self.changed:
            if (found := self._objects.get((plural, namespace, name))) is None:
                raise Missing(name)
            return json.loads(json.dumps(found))

    def change(self, plural: str, namespace: str, name: str, change: Mapping[str, Any]) -> Object:
        """Merge a change into an object."""
        with self.changed:
            if (found := self._objects.get((plural, namespace, name))) is None:
                raise Missing(name)
            _merge(found, change)
            return self._announce(plural, "MODIFIED", found)

    def remove(self, plural: str, namespace: str, name: str) -> None:
        """Remove an object, if it is there."""
        with self.changed:
            if (found := self._objects.pop((plural, namespace, name), None)) is not None:
                self._announce(plural, "DELETED", found)

    def chosen(self, plural: str, namespace: str, query: Mapping[str, list[str]]) -> list[Object]:
        """Return copies of the objects that the selectors of a query choose."""
        with self.changed:
            found = [one for (kind, place, _), one in self._objects.items() if (kind, place) == (plural, namespace)]
            return json.loads(json.dumps([one for one in found if selects(query, one)]))

    def after(self, seen: int, limit_s: float) -> list[tuple[str, str, Object]]:
        """Wait for events after the first ones, at most for a limit, and return them."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.events) > seen, limit_s)
            return self.events[seen:]

    def _announce(self, plural: str, kind: str, found: Object) -> Object:
        found["metadata"]["resourceVersion"] = str(len(self.events) + 1)
        copied: Object = json.loads(json.dumps(found))
        self.events.append((plural, kind, copied))
        self.changed.notify_all()
        return copied


def _merge(into: Object, change: Mapping[str, Any]) -> None:
    for name, value in change.items():
        if value is None:
            into.pop(name, None)
        elif isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def selects(query: Mapping[str, list[str]], one: Object) -> bool:
    """Return whether label and field selectors choose an object."""
    labels = one["metadata"].get("labels", {})
    for term in _terms(query.get("labelSelector", [""])[0]):
        if " in " in term:
            name, _, values = term.partition(" in ")
            if labels.get(name) not in values.strip("()").split(","):
                return False
        elif "!=" in term:
            name, _, value = term.partition("!=")
            if labels.get(name) == value:
                return False
        elif term.startswith("!"):
            if term[1:] in labels:
                return False
        else:
            name, _, value = term.partition("=")
            if labels.get(name) != value.lstrip("="):
                return False
    for term in _terms(query.get("fieldSelector", [""])[0]):
        path, _, value = term.partition("=")
        found: Any = one
        for part in path.split("."):
            found = found.get(part, {})
        if found != value.lstrip("="):
            return False
    return True


def _terms(selector: str) -> list[str]:
    """Split a selector at the commas outside of parentheses."""
    terms, depth = [""], 0
    for letter in selector:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            terms.append("")
        else:
            terms[-1] += letter
    return [one for one in terms if one]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    kubernetes: ClassVar["FakeKubernetes"]

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        """Append the request to those that the server got, without output."""
        self.kubernetes.requests.append(format % args)

    def do_GET(self) -> None:
        plural, namespace, name, query = self._target()
        if self.headers.get("Upgrade"):
            self._fail(200, "no WebSockets")
        elif query.get("watch") == ["true"]:
            self._watch(plural, namespace, query)
        elif name:
            self._reply(self.kubernetes.objects.get, plural, namespace, name)
        else:
            self._reply(self._listed, plural, namespace, query)

    def do_POST(self) -> None:
        plural, namespace, _, _ = self._target()
        self._reply(self.kubernetes.create, plural, namespace, self._body())

    def do_PATCH(self) -> None:
        plural, namespace, name, _ = self._target()
        self._reply(self.kubernetes.apply, plural, namespace, name, self._body())

    def do_DELETE(self) -> None:
        plural, namespace, name, query = self._target()
        self._body()
        names = [name] if name else [one["metadata"]["name"] for one in self.kubernetes.objects.chosen(plural, namespace, query)]
        self._reply(self._deleted, plural, namespace, names)

    def _target(self) -> tuple[str, str, str, dict[str, list[str]]]:
        address = urlsplit(self.path)
        parts = [*address.path.split("/"), "", "", ""]  # "", "api", "v1", "namespaces", NAMESPACE, PLURAL, NAME
        return parts[5], parts[4], parts[6], parse_qs(address.query)

    def _body(self) -> Object:
        length = int(self.headers.get("Content-Length") or 0)
        return json.loads(self.rfile.read(length) or b"{}")

    def _listed(self, plural: str, namespace: str, query: Mapping[str, list[str]]) -> Object:
        kinds = {"pods": "PodList", "configmaps": "ConfigMapList", "services": "ServiceList"}
        found = self.kubernetes.objects.chosen(plural, namespace, query)
        version = str(len(self.kubernetes.objects.events))
        return {"apiVersion": "v1", "kind": kinds.get(plural, "List"), "metadata": {"resourceVersion": version}, "items": found}

    def _deleted(self, plural: str, namespace: str, names: Sequence[str]) -> Object:
        for name in names:
            self.kubernetes.delete(plural, namespace, name)
        return {"apiVersion": "v1", "kind": "Status", "status": "Success"}

    def _watch(self, plural: str, namespace: str, query: Mapping[str, list[str]]) -> None:
        objects = self.kubernetes.objects
        seen = int(query.get("resourceVersion", ["0"])[0] or 0) or len(objects.events)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with suppress(OSError):  # the client has closed the connection
            while not self.kubernetes.stopping.is_set():
                fresh = objects.after(seen, _WATCH_S)
                seen += len(fresh)
                for kind, event, found in fresh:
                    if kind == plural and found["metadata"]["namespace"] == namespace and selects(query, found):
                        line = json.dumps({"type": event, "object": found}).encode() + b"\n"
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.flush()
        self.close_connection = True

    def _reply(self, action: Callable[..., Object], *arguments: Any) -> None:
        try:
            found = action(*arguments)
        except Missing as error:
            self._fail(404, f"{error} not found")
            return
        self._send(201 if self.command == "POST" else 200, found)

    def _fail(self, code: int, message: str) -> None:
        self._send(code, {"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "message": message})

    def _send(self, code: int, found: Object) -> None:
        body = json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class FakeKubernetes:
    """Running API server and kubelet; a context manager that ends all pods.

    Args:
        place: new folder for the logs of the pods.
        variables: environment that the image of the pods has.
        launcher: function that returns the command line of a container from its command and its folder.

    Attributes:
        address: address of the API server; empty before the start.
        requests: requests that the server got.
    """

    def __init__(self, place: Path, variables: Mapping[str, str], launcher: Launcher) -> None:
        self.address = ""
        self._created: list[tuple[str, str]] = []  # namespace, definition
        self.requests: list[str] = []
        self.objects = Objects()
        self.stopping = threading.Event()
        self._place = place
        self._variables = variables
        self._launcher = launcher
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"kubernetes": self}))
        self._server.daemon_threads = True

    def __enter__(self) -> Self:
        """Start the API server."""
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._run(self._server.serve_forever)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End all pods and the API server."""
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        for process in list(self._processes.values()):
            _end(process)
        for thread in self._threads:
            thread.join(_STOP_S)

    def create(self, plural: str, namespace: str, found: Object) -> Object:
        """Create an object; the kubelet runs a pod."""
        if plural == "pods":
            self._created.append((namespace, json.dumps(found)))
            found["status"] = {"phase": "Pending"}
            stored = self.objects.put(plural, namespace, found)
            self._run(self._run_pod, stored, f"127.0.1.{len(self._created)}")
            return stored
        return self.objects.put(plural, namespace, found)

    def apply(self, plural: str, namespace: str, name: str, found: Object) -> Object:
        """Merge a change into an object, or create it."""
        if (plural, namespace, name) in self.objects:
            return self.objects.change(plural, namespace, name, found)
        return self.create(plural, namespace, found)

    def delete(self, plural: str, namespace: str, name: str) -> None:
        """Delete an object; a pod ends first.

        Raises:
            Missing: there is no such object.
        """
        self.objects.get(plural, namespace, name)
        if plural == "pods":
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self.objects.change(plural, namespace, name, {"metadata": {"deletionTimestamp": stamp}})
            if (process := self._processes.get(name)) is not None:
                _end(process)
        self.objects.remove(plural, namespace, name)

    def created_in(self, namespace: str) -> list[str]:
        """Return the definitions of all pods that were created in a namespace, as text."""
        return [definition for place, definition in self._created if place == namespace]

    def pods(self, namespace: str) -> Mapping[str, psutil.Process]:
        """Return the running pods: the process of each, by name."""
        names = [one["metadata"]["name"] for one in self.objects.chosen("pods", namespace, {})]
        running = {name: self._processes[name] for name in names if name in self._processes}
        return {name: psutil.Process(one.pid) for name, one in running.items() if one.poll() is None}

    def log(self, name: str) -> str:
        """Return the last part of a pod's output."""
        return (self._place / name / "log").read_text(errors="replace")[-5_000:]

    def _run(self, action: Callable[..., object], *arguments: Any) -> None:
        thread = threading.Thread(target=action, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run_pod(self, pod: Object, address: str) -> None:
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
        place = self._place / name
        place.mkdir(parents=True)
        mounted = self._mount(pod, place)
        command = [mounted(one) for one in (*container.get("command", ()), *container.get("args", ()))]
        environment = {**self._variables, **{one: mounted(value) for one, value in _variables(pod, container, address)}}
        with (place / "log").open("wb") as log:
            process = subprocess.Popen(
                self._launcher(command, place),
                cwd="/",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes[name] = process
        started: Object = {"name": container["name"], "ready": True, "restartCount": 0, "image": container["image"]}
        self._report(pod, "Running", address, {**started, "state": {"running": {}}})
        code = process.wait()
        ended = {**started, "ready": False, "state": {"terminated": {"exitCode": code % 256, "reason": "Error"}}}
        self._report(pod, "Failed" if code else "Succeeded", address, ended)

    def _mount(self, pod: Object, place: Path) -> Callable[[str], str]:
        """Write the files of a pod's ConfigMaps; return a function that replaces their paths in a text."""
        folders: dict[str, str] = {}
        mounts = {one["name"]: one["mountPath"] for one in pod["spec"]["containers"][0]["volumeMounts"]}
        for volume in pod["spec"]["volumes"]:
            if (wanted := volume.get("configMap")) and volume["name"] in mounts:
                files = self._await("configmaps", pod["metadata"]["namespace"], wanted["name"])["data"]
                folder = place / volume["name"]
                folder.mkdir()
                for name, content in files.items():
                    (folder / name).write_text(content)
                folders[mounts[volume["name"]]] = str(folder)

        def mounted(text: str) -> str:
            for path, folder in folders.items():
                text = text.replace(path, folder)
            return text

        return mounted

    def _await(self, plural: str, namespace: str, name: str) -> Object:
        """Wait for an object, which Spark may create after the pod."""
        with self.objects.changed:
            self.objects.changed.wait_for(lambda: (plural, namespace, name) in self.objects, _STOP_S)
        return self.objects.get(plural, namespace, name)

    def _report(self, pod: Object, phase: str, address: str, container: Object) -> None:
        status = {"phase": phase, "podIP": address, "hostIP": _NODE, "containerStatuses": [container]}
        with suppress(Missing):  # it was deleted
            self.objects.change("pods", pod["metadata"]["namespace"], pod["metadata"]["name"], {"status": status})


def _variables(pod: Object, container: Object, address: str) -> Iterator[tuple[str, str]]:
    fields = {"status.podIP": address, "metadata.name": pod["metadata"]["name"]}
    for one in container.get("env", ()):
        if "valueFrom" in one:
            yield one["name"], fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            yield one["name"], one.get("value", "")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process, and kill what is left of its process group."""
    with suppress(psutil.NoSuchProcess):
        whole = psutil.Process(process.pid)
        left = [whole, *whole.children(recursive=True)]
        process.terminate()
        psutil.wait_procs([whole], timeout=_STOP_S)
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, timeout=_STOP_S)
