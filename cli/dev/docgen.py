"""What is generated: most of the docs (dictionary, diagram, matrix, policy, settings, runbooks, schema), and the Sparkplug codec.

``python -m cli.dev.docgen`` writes them, ``--check`` says which are stale.
"""

import ast
import inspect
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from fleetpulse.core.lifecycle import TRANSITIONS, Mode, Trigger
from fleetpulse.core.policy import MAX_BYTES, MAX_CLASSES, RULES, Rules
from fleetpulse.core.quality.table_suites import SUITES
from fleetpulse.core.rows import FORMAT_VERSION, FROM_DEVICES
from fleetpulse.core.tables import READINGS, TABLES
from fleetpulse.core.text import MAX_TEXT
from fleetpulse.core.times import format_duration
from fleetpulse.paths import ROOT
from fleetpulse.settings import Settings

CODEC: Final = "fleetpulse/io/mqtt/sparkplug/sparkplug_b"
_MARK: Final = "<!-- generated from {} by: python -m cli.dev.docgen -->\n\n"


def tables() -> str:
    """Return the data dictionary."""
    text = _MARK.format("fleetpulse/core/tables.py") + "# The tables\n\nAll are Delta tables below a home's `tables/`.\n"
    for table in TABLES:
        text += f"\n## {table.name}\n\n{table.meaning}\n\nKey: {', '.join(f'`{name}`' for name in table.key)}."
        if table.partitioned_by:
            text += f" Partitioned by {', '.join(f'`{name}`' for name in table.partitioned_by)}."
        text += "\n\n| column | type | always there | meaning |\n| --- | --- | --- | --- |\n"
        for column in table.columns:
            text += f"| `{column.name}` | {column.type} | {'yes' if column.required else ''} | {column.meaning} |\n"
    text += "\n## Readings of judgements\n\n| reading | its rows |\n| --- | --- |\n"
    return text + "".join(f"| `{one.name}` | {one.meaning} |\n" for one in READINGS)


def lifecycle() -> str:
    """Return the diagram and the matrix of the device lifecycle."""
    text = _MARK.format("fleetpulse/core/lifecycle.py") + "# The device lifecycle\n\n"
    text += """What each mode means, and what follows from what. *live* is online as a device's facts give it: provisioned if it
was never heard, else flagged, else degraded, else online; unreachable where a hold ends behind a dead gateway.
*amended* leads from any mode to that of the amended history.
"""
    text += "\n```mermaid\nstateDiagram-v2\n    [*] --> provisioned\n"
    for (mode, trigger), target in TRANSITIONS.items():
        text += f"    {mode.value} --> {target.value}: {trigger.value}\n"
    text += "    forgotten --> [*]\n```\n\n| mode | " + " | ".join(trigger.value for trigger in Trigger) + " |\n"
    text += "| --- |" + " --- |" * len(Trigger) + "\n"
    for mode in Mode:
        targets = (TRANSITIONS.get((mode, trigger)) for trigger in Trigger)
        cells = ("live" if target is Mode.ONLINE else target.value if target else "" for target in targets)
        text += f"| **{mode.value}** | " + " | ".join(cells) + " |\n"
    return text


def policy() -> str:
    """Return the table of rules."""
    text = _MARK.format("fleetpulse/core/policy.py") + "# The rules of a policy\n\n"
    text += 'A policy is a TOML file: `unknown_devices = "admit"` or `"quarantine"`, the rules of every class in '
    text += "`[rules]`, and what differs in `[classes.NAME]`. `fleet policy check FILE` shows what it comes to.\n"
    text += (
        f"It lists at most {MAX_CLASSES} classes; a name or an error code has 1 to {MAX_TEXT} printable characters, and all of "
    )
    text += f"it {MAX_BYTES:,} bytes at most as it is stored: every key group keeps it.\n\n"
    text += '```toml\nunknown_devices = "admit"\n\n[rules]\ntimeout = "30m"\ndegraded.errors = 5\n\n'
    text += '[classes.meter]\ntimeout = "2h"\n```\n\n'
    text += "| rule | built in | meaning |\n| --- | --- | --- |\n"
    for name, rule in RULES.items():
        value = getattr(Rules(), name)
        shown = format_duration(value) if name.endswith("_ms") else ", ".join(value) if isinstance(value, tuple) else value
        text += f"| `{rule.key}` | {shown} | {rule.meaning} |\n"
    return text


def settings() -> str:
    """Return the table of settings; what each means is said where it is declared."""
    text = _MARK.format("fleetpulse/settings.py") + "# Settings of an installation\n\n"
    text += "The environment wins over the home's `settings.toml`. Durations are written as `90s`, `5m`, `1h`, `2d`.\n\n"
    text += "| in settings.toml | in the environment | default | meaning |\n| --- | --- | --- | --- |\n"
    _, _, declared = inspect.cleandoc(Settings.__doc__ or "").partition("Attributes:\n")
    meanings = dict(re.findall(r"^    (\w+): (.*(?:\n        .*)*)", declared, re.MULTILINE))
    for name, field in Settings.model_fields.items():
        meaning = " ".join(meanings[name].replace("``", "`").split())
        text += f"| `{name}` | `FLEET_{name.upper()}` | {_default_of(field.default)} | {meaning} |\n"
    return text


def _default_of(value: object) -> str:
    return "none" if value == "" else f"`{value}`"


def dags() -> str:
    """Return the runbooks of the DAGs: what each is for, when it runs, what it changes, how to undo it."""
    runbooks = {path.stem: ast.get_docstring(ast.parse(path.read_text())) or "" for path in sorted((ROOT / "dags").glob("*.py"))}
    text = _MARK.format("the docstrings in dags/") + "# The DAGs and their runbooks\n\n| DAG | what it is for |\n| --- | --- |\n"
    for name, runbook in runbooks.items():
        text += f"| [`{name}`](#{name}) | {runbook.splitlines()[0].removeprefix('# ')} |\n"
    for name, runbook in runbooks.items():
        heading, _, rest = runbook.partition("\n")
        text += f"\n## {name}\n{heading.removeprefix('# ')}\n{rest}\n"
    return text


def schema() -> str:
    """Return the JSON Schema of a device's payload."""
    text = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT}
    whole = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
    named = {"anyOf": [text, {"type": "integer"}]}
    fields: dict[str, tuple[dict[str, Any], str]] = {
        "ts": ({"type": "number"}, "when it happened, epoch milliseconds; without it, when it was received"),
        "seq": (whole, "the device's message counter; without a boot, falling back is a reboot, unless it has wrapped"),
        "boot": (named, "names the run since the last start; a will of another boot is ignored if either names no session"),
        "session": (named, "names the connection to the broker; a will of another session is ignored"),
        "uptime_s": (whole, "seconds since the last start"),
        "code": (named, "error code, in messages of kind error"),
        "firmware": (text, "firmware version"),
        "gateway": (text, "through whom it came; a will that names its own device is a gateway's, and of all behind it"),
        "metrics": ({"type": "object"}, "measured values"),
        "device_id": (text, "may be left out; where it is there it agrees with the topic, and so do site and kind"),
    }
    content = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"fleetpulse message, version {FORMAT_VERSION}",
        "description": f"Payload on fleet/<site>/<device_id>/<kind>, where kind is one of {', '.join(sorted(FROM_DEVICES))}.",
        "type": "object",
        "properties": {name: {**rule, "description": meaning} for name, (rule, meaning) in fields.items()},
    }
    return json.dumps(content, indent=2) + "\n"


def suites() -> str:
    """Return the suites of data quality, with what each expects."""
    text = _MARK.format("fleetpulse/core/quality/suites.py, laws.py and state_laws.py") + "# The suites of data quality\n\n"
    text += "How they are used, and what to do where one fails: [data quality](quality.md).\n"
    for suite in SUITES:
        text += f"\n## {suite.name}\n\n{suite.meaning}\nTable: `{suite.about}`."
        text += (
            " Compared with all messages judged again, since the first row of bronze or since a snapshot." if suite.again else ""
        )
        text += "\n\n| expectation | severity | what must hold |\n| --- | --- | --- |\n"
        text += "".join(f"| {one.name} | {one.severity} | {one.meaning} |\n" for one in suite.expectations)
    return text


def codec(ending: str) -> str:
    """Return what protoc makes of the description of Sparkplug's payloads: ``_pb2.py``, or the types of it, ``_pb2.pyi``."""
    source = ROOT / f"{CODEC}.proto"
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-m", "grpc_tools.protoc", f"-I{source.parent}", f"--python_out={folder}"]
        subprocess.run([*command, f"--pyi_out={folder}", source.name], check=True)
        return (Path(folder) / f"{source.stem}{ending}").read_text()


FILES: Final = {
    "docs/tables.md": tables,
    "docs/lifecycle.md": lifecycle,
    "docs/policy.md": policy,
    "docs/settings.md": settings,
    "docs/dags.md": dags,
    "docs/suites.md": suites,
    "docs/message-v1.schema.json": schema,
    f"{CODEC}_pb2.py": partial(codec, "_pb2.py"),
    f"{CODEC}_pb2.pyi": partial(codec, "_pb2.pyi"),
}


def main(arguments: list[str]) -> int:
    """Write the files, or say which are stale."""
    stale: list[str] = []
    for name, made in FILES.items():
        path, text = ROOT / name, made()
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if "--check" not in arguments:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    if stale and "--check" in arguments:
        sys.stderr.write(f"stale: {', '.join(stale)}; run: .venv/bin/python -m cli.dev.docgen\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
