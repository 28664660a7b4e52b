"""Container images that this tree builds on: each is pinned by digest.

A digest names the same bytes for ever; a tag can be moved. An image without a digest is a fault.
"""

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.paths import ROOT

FILES: Final = ("docker-compose.yml", "infra/images/Dockerfile", "infra/kubernetes/airflow/postgres.yaml")
OWN: Final = "fleetpulse"  # built from this tree
_LIMIT_S: Final = 120
_IMAGE: Final = re.compile(
    r"(?P<before>^ *image: +|^[ \t]*FROM +(?:--\S+ +)*|^[ \t]*(?:COPY|ADD) +(?:--\S+ +)*?--from=|--mount=\S*?\bfrom=)"
    r"(?P<name>[^\s:@,]+)(?::(?P<tag>[^\s@,]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?(?=[\s,]|$)",
    re.MULTILINE | re.IGNORECASE,
)
_STAGE: Final = re.compile(r"^[ \t]*FROM +.*\sAS +(\S+)", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Image:
    """Image that a file names.

    Attributes:
        file: file that names it, below the root folder.
        name: name without tag and digest.
        tag: tag; empty if there is none.
        digest: digest with its algorithm; empty if there is none.
    """

    file: str
    name: str
    tag: str
    digest: str


def images(root: Path = ROOT) -> Iterator[Image]:
    """Yield the images in the Compose file, the Dockerfile and the manifests, except this project's own.

    Build stages of the Dockerfile are not images.
    """
    for file in FILES:
        text = (root / file).read_text()
        for found in _IMAGE.finditer(text):
            if _is_foreign(found, text):
                yield Image(file, found["name"], found["tag"] or "", found["digest"] or "")


def _is_foreign(found: re.Match[str], text: str) -> bool:
    """Return whether a name in a file names an image that is not built from this tree."""
    name = found["name"].lower()
    is_stage = not found["tag"] and (name.isdecimal() or name in {one.lower() for one in _STAGE.findall(text)})
    return name not in (OWN, "scratch") and not is_stage


def image_faults(root: Path = ROOT) -> list[str]:
    """Return a fault for each image without a tag or a digest."""
    return [
        f"{one.file}: {one.name}:{one.tag or '(no tag)'} has no {'digest' if one.tag else 'tag'}; "
        f"{'run: ./fleet lock --images' if one.tag else 'add the tag of a version'}"
        for one in images(root)
        if not (one.tag and one.digest)
    ]


def pin_images(root: Path = ROOT, docker: Sequence[str] = ("docker",)) -> list[str]:
    """Look the tags up with Docker, and write their present digests into the files.

    Args:
        root: root folder of the project.
        docker: command of Docker with buildx.

    Returns:
        One line for each image: its digest, and the previous one if that differs.

    Raises:
        FleetError: Docker is missing, or it cannot look a tag up. No file is changed then.
    """
    lines: list[str] = []
    digests: dict[tuple[str, str], str] = {}
    for one in images(root):
        if not one.tag:
            raise FleetError(f"{one.file}: {one.name} has no tag; add the tag of a version", code="image-without-tag")
        digests[one.name, one.tag] = digest = _digest(f"{one.name}:{one.tag}", docker)
        before = f", before: {one.digest or 'none'}" if digest != one.digest else ", unchanged"
        lines.append(f"{one.name}:{one.tag} is {digest}{before}")
    for file in FILES:
        path = root / file
        text = path.read_text()
        pinned = _IMAGE.sub(
            lambda found, text=text: (
                f"{found['before']}{found['name']}:{found['tag']}@{digests[found['name'], found['tag']]}"
                if _is_foreign(found, text)
                else found[0]
            ),
            text,
        )
        if pinned != text:
            path.write_text(pinned)
    return lines


def _digest(image: str, docker: Sequence[str]) -> str:
    """Return the digest of a tag: of the index of all platforms, if the image has several."""
    command = [*docker, "buildx", "imagetools", "inspect", image, "--format", "{{.Manifest.Digest}}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        found = done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        found, reason = "", str(error)
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", found):
        raise FleetError(
            f"Docker cannot look up {image} ({reason}); install Docker with buildx, check the network, and try again",
            code="image-not-found",
        )
    return found
