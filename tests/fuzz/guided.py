"""Program for coverage-guided fuzzing of the decoders with libFuzzer (atheris), which takes over the process.

Usage: ``python -m tests.fuzz.guided TARGET INPUTS SEED FOLDER``, where TARGET is ``messages`` or ``packets``.
It writes the counts to ``FOLDER/TARGET.json``, and an input that breaks a law to ``FOLDER/broken-...``.
"""

import json
import os
import sys
from pathlib import Path

import atheris

_INSTRUMENTED = ["fleetpulse.core.messages.decode", "fleetpulse.core.messages.mapping", "fleetpulse.io.mqtt.codec"]
with atheris.instrument_imports(include=_INSTRUMENTED):  # pyright: ignore[reportAttributeAccessIssue]
    from tests.fuzz.inputs import FIELDS, KINDS, LEVELS, TOKENS, packet_seeds, seeds
    from tests.fuzz.laws import Checker


def _corpus(folder: Path, target: str) -> Path:
    corpus = folder / f"{target}-corpus"
    corpus.mkdir()
    for number, data in enumerate(packet_seeds() if target == "packets" else seeds()):
        (corpus / f"{number:04d}").write_bytes(data)
    return corpus


def _dictionary(folder: Path) -> Path:
    path = folder / "dictionary"
    entries = {text.encode() for text in (*LEVELS, *KINDS, *TOKENS, *(f'"{name}":' for name in FIELDS))}
    escaped = ("".join(f"\\x{byte:02x}" for byte in entry[:60]) for entry in sorted(entries) if entry)
    path.write_text("".join(f'"{entry}"\n' for entry in escaped))
    return path


def main(target: str, inputs: int, seed: int, folder: Path) -> None:
    """Check a number of inputs, write the counts and end the process."""
    checker = Checker()
    check = checker.packets if target == "packets" else checker.message

    def check_input(data: bytes) -> None:
        check(data)
        if checker.inputs >= inputs:
            checker.land()
            (folder / f"{target}.json").write_text(json.dumps(checker.summary()))
            sys.stdout.flush()
            os._exit(0)  # libFuzzer cannot stop at a given number of inputs

    options = [f"-seed={seed}", "-max_len=8192", f"-dict={_dictionary(folder)}", f"-artifact_prefix={folder}/broken-"]
    atheris.Setup([sys.argv[0], *options, "-timeout=60", "-rss_limit_mb=4096", str(_corpus(folder, target))], check_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
