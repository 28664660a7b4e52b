"""Where downloads are kept: one folder of the project, so that removing it leaves nothing behind."""

import os
from pathlib import Path


def project_cache() -> Path:
    """The folder for what is fetched once: ``FLEET_CACHE``, ``.cache`` beside the source, or the user's cache.

    The folder need not exist. An installed wheel has no project around it, hence the last case.
    """
    if named := os.environ.get("FLEET_CACHE"):
        return Path(named).absolute()
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file():
        return root / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fleetpulse"


def replace_file(target: Path, content: bytes) -> None:
    """Write ``target`` so that a reader sees the old content or the new, never a part.

    Raises:
        OSError: the folder cannot be made or written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
