"""Container images: each is pinned by digest, and Docker looks the digests up."""

from pathlib import Path

import pytest

from cli.dev.images import FILES, image_faults, images, pin_images
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
OLD, NEW = f"sha256:{'0' * 64}", f"sha256:{'1' * 64}"
COMPOSE = f"""x-ours: &ours
  image: fleetpulse:0.1.0
services:
  postgres:
    image: postgres:17.5-bookworm{{}} # a comment
  other:
    image: redis:8@{OLD}
"""
DOCKERFILE = f"""FROM --platform=$BUILDPLATFORM python:3.11-slim{{}} AS build
COPY --chown=1:1 --from=busybox:1.37@{OLD} a b
RUN --mount=type=bind,from=alpine:3.22@{OLD},target=/a --mount=from=build,target=/b true
FROM scratch
COPY --from=build a b
COPY --from=0 a b
"""
MANIFEST = """spec:
  containers:
    - name: postgres
      image: postgres:17.5-bookworm{}
    - name: ours
      image: fleetpulse:0.1.0
"""
TEXTS = (COMPOSE, DOCKERFILE, MANIFEST)


def tree(folder: Path, pinned: str = "") -> Path:
    for file, text in zip(FILES, TEXTS, strict=True):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text.format(pinned))
    return folder


def docker(folder: Path, script: str) -> list[str]:
    (folder / "docker").write_text(f"#!/bin/sh\n{script}\n")
    return ["/bin/sh", str(folder / "docker")]


def test_the_images_of_this_tree_are_pinned() -> None:
    assert [one.name for one in images()] == ["postgres", "python", "postgres"]
    assert image_faults() == []


def test_an_image_without_a_digest_or_a_tag_is_reported(tmp_path: Path) -> None:
    root = tree(tmp_path)
    assert image_faults(root) == [
        "docker-compose.yml: postgres:17.5-bookworm has no digest; run: ./fleet lock --images",
        "infra/images/Dockerfile: python:3.11-slim has no digest; run: ./fleet lock --images",
        "infra/kubernetes/airflow/postgres.yaml: postgres:17.5-bookworm has no digest; run: ./fleet lock --images",
    ]
    (root / FILES[1]).write_text(f"FROM python@{OLD}\n")
    assert image_faults(root)[1] == "infra/images/Dockerfile: python:(no tag) has no tag; add the tag of a version"


@pytest.mark.parametrize("pinned", ["", f"@{OLD}"])
def test_tags_are_looked_up_and_pinned(tmp_path: Path, pinned: str) -> None:
    root = tree(tmp_path, pinned)
    lines = pin_images(root, docker(tmp_path, f'[ "$1 $2 $3" = "buildx imagetools inspect" ] && echo {NEW}'))
    assert lines == [
        f"postgres:17.5-bookworm is {NEW}, before: {pinned[1:] or 'none'}",
        f"redis:8 is {NEW}, before: {OLD}",
        f"python:3.11-slim is {NEW}, before: {pinned[1:] or 'none'}",
        f"busybox:1.37 is {NEW}, before: {OLD}",
        f"alpine:3.22 is {NEW}, before: {OLD}",
        f"postgres:17.5-bookworm is {NEW}, before: {pinned[1:] or 'none'}",
    ]
    assert [(root / file).read_text() for file in FILES] == [text.format(f"@{NEW}").replace(OLD, NEW) for text in TEXTS]


@pytest.mark.parametrize(
    "script", ["echo 'no such host' >&2; exit 1", "echo latest", f"case $4 in python*) exit 1; esac; echo {NEW}"]
)
def test_no_file_changes_if_a_tag_cannot_be_looked_up(tmp_path: Path, script: str) -> None:
    root = tree(tmp_path)
    with refused("image-not-found"):
        pin_images(root, docker(tmp_path, script))
    assert [(root / file).read_text() for file in FILES] == [text.format("") for text in TEXTS]


def test_a_missing_docker_is_reported(tmp_path: Path) -> None:
    with refused("image-not-found"):
        pin_images(tree(tmp_path), [str(tmp_path / "absent")])
