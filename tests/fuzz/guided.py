"""Inputs that libFuzzer makes, led by which lines of the decoders they reach (atheris): it takes over the process.

Called as ``python -m tests.fuzz.guided WAY INPUTS SEED FOLDER``; the counts go to ``FOLDER/WAY.json``, an input that breaks a
law to ``FOLDER/broken-...``.
"""

import json
import os
import sys
from pathlib import Path

import atheris

_LED_BY = ["fleetpulse.core.messages.decode", "fleetpulse.core.messages.mapping", "fleetpulse.io.mqtt.codec"]
with atheris.instrument_imports(include=_LED_BY):  # pyright: ignore[reportAttributeAccessIssue]
    from tests.fuzz.inputs import FIELDS, KINDS, TOKENS, WORDS, packet_seeds, seeds
    from tests.fuzz.laws import Accounts


def _corpus(folder: Path, way: str) -> Path:
    corpus = folder / f"{way}-corpus"
    corpus.mkdir()
    for number, data in enumerate(packet_seeds() if way == "packets" else seeds()):
        (corpus / f"{number:04d}").write_bytes(data)
    return corpus


def _dictionary(folder: Path) -> Path:
    path = folder / "words"
    words = {word.encode() for word in (*WORDS, *KINDS, *TOKENS, *(f'"{name}":' for name in FIELDS))}
    quoted = ("".join(f"\\x{byte:02x}" for byte in word[:60]) for word in sorted(words) if word)
    path.write_text("".join(f'"{word}"\n' for word in quoted))
    return path


def main(way: str, inputs: int, seed: int, folder: Path) -> None:
    """Run so many inputs and end the process."""
    accounts = Accounts()
    take = accounts.packets if way == "packets" else accounts.message

    def one(data: bytes) -> None:
        take(data)
        if accounts.inputs >= inputs:
            accounts.land()
            (folder / f"{way}.json").write_text(json.dumps(accounts.said()))
            sys.stdout.flush()
            os._exit(0)  # libFuzzer has no other way to stop at a number of our own

    options = [f"-seed={seed}", "-max_len=8192", f"-dict={_dictionary(folder)}", f"-artifact_prefix={folder}/broken-"]
    atheris.Setup([sys.argv[0], *options, "-timeout=60", "-rss_limit_mb=4096", str(_corpus(folder, way))], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
