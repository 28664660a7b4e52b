"""Installation steps of the image: they need neither a container engine nor an image."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fleetpulse import __version__
from fleetpulse.paths import ROOT, cache_dir

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1800)]


def test_a_tree_is_installed_and_starts_without_a_network(tmp_path: Path) -> None:
    tree = tmp_path / "opt"
    for folder in ("fleetpulse", "streaming", "batch", "cli", "infra", "requirements"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__", "secrets"))
    shutil.copy(ROOT / "fleet", tree)
    inherited = {name: value for name, value in os.environ.items() if name not in ("FLEET_VENV", "PYTHONPATH")}
    cache = tmp_path / "cache"  # downloads are reused; Spark's classes are those of this tree
    cache.mkdir()
    for fetched in cache_dir().glob("ja*"):
        (cache / fetched.name).symlink_to(fetched)
    environment = {
        **inherited,
        "FLEET_CACHE": str(cache),
        "FLEET_PYTHON": sys.executable,
        "NUMBA_CACHE_DIR": str(tmp_path / "numba"),
    }
    for step in ("packages", "rest"):
        command = [tree / "infra" / "images" / "install", step]  # as in the Dockerfile, including Airflow
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
        assert done.returncode == 0, done.stderr
    compiled, classes = done.stdout.splitlines()[-2:]
    assert compiled == "the fold is compiled" and classes.startswith("Spark's class archive is ready: "), done.stdout
    assert any((tmp_path / "numba").rglob("*.nbc"))
    imports = "import airflow, great_expectations, psycopg2"
    command = [tree / ".venv" / "bin" / "python", "-c", imports]
    done = subprocess.run(command, env={**environment, "AIRFLOW_HOME": str(tmp_path / "airflow")},
                          capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    offline = {**environment, "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    for verb in ("version", "fetch"):
        done = subprocess.run([tree / "fleet", verb], env=offline, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert verb != "version" or done.stdout.strip() == __version__
    if sys.platform == "linux":
        command = [tree / ".venv" / "bin" / "python", "-c", _MAPPED, tmp_path / "local"]
        done = subprocess.run(command, env={**offline, "PYTHONPATH": str(tree)}, capture_output=True, text=True,
                              timeout=200, check=False)  # fmt: skip
        assert done.stdout.splitlines()[-1:] == ["True"], f"a session does not use the classes: {done.stdout}{done.stderr}"
    shutil.rmtree(cache / "classes")  # 0.2 GB, and pytest keeps the files of a test


# Prints whether the JVM of a session has mapped the archive of Spark's classes.
_MAPPED = """
import sys
from pathlib import Path
from fleetpulse.io.spark.session import spark_session
spark = spark_session("test", local_dir=Path(sys.argv[1]))
java = spark.sparkContext._jvm.ProcessHandle.current().pid()
print(any("/cache/classes/" in line and line.endswith(".jsa") for line in Path(f"/proc/{java}/maps").read_text().splitlines()))
spark.stop()
"""
# A temporary, private layer in memory over this machine's files: whatever is installed into it is removed with it.
_LAYER = """
set -e
mount -t tmpfs -o size=2g tmpfs {at}
mkdir {at}/upper {at}/work {at}/root
mount -t overlay overlay -o lowerdir=/,upperdir={at}/upper,workdir={at}/work {at}/root
mount --rbind /dev {at}/root/dev
mount -t proc proc {at}/root/proc
exec chroot {at}/root /bin/sh -ec {script}
"""


def _in_a_layer(at: Path, script: str) -> subprocess.CompletedProcess[str]:
    command = ["unshare", "--mount", "sh", "-c", _LAYER.format(at=shlex.quote(str(at)), script=shlex.quote(script))]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def _system_steps() -> list[str]:
    """Return the commands that the image runs before it contains files of the project."""
    before = (ROOT / "infra" / "images" / "Dockerfile").read_text().partition("\nCOPY ")[0]
    return re.findall(r"^RUN ((?:.*\\\n)*.*)$", before, re.MULTILINE)


def test_system_packages_of_the_image_are_installed_by_its_own_steps(tmp_path: Path) -> None:
    if not shutil.which("unshare") or _in_a_layer(tmp_path, "true").returncode:
        pytest.skip("a layer over this machine's files cannot be mounted: this needs root on Linux, and overlay file systems")
    base = re.search(r"^FROM \S+-(\w+)(?:@\S+)?$", (ROOT / "infra" / "images" / "Dockerfile").read_text(), re.MULTILINE)
    assert base
    if f"VERSION_CODENAME={base[1]}\n" not in Path("/etc/os-release").read_text():
        pytest.skip(f"the image is of Debian {base[1]}, and this machine is not")
    if (update := _in_a_layer(tmp_path, "apt-get update -o APT::Update::Error-Mode=any")).returncode:
        pytest.skip(f"Debian's packages are not available here: {update.stderr.strip().splitlines()[-1]}")
    steps = _system_steps()
    assert len(steps) == 2, "Java, and the user"
    checks = "java -version; id -u fleet; stat -c '%U %a %n' /var/lib/fleetpulse/*; ls /var/lib/apt/lists"
    users = Path("/etc/passwd").read_text()
    done = _in_a_layer(tmp_path, "\n".join([*steps, checks]))
    assert done.returncode == 0, done.stderr
    java = re.search(r'openjdk version "(\d+)', done.stderr)
    assert java
    assert int(java[1]) >= 17
    assert done.stdout.splitlines()[-3:] == [
        "10001",
        "fleet 750 /var/lib/fleetpulse/airflow",
        "fleet 750 /var/lib/fleetpulse/home",
    ]
    assert Path("/etc/passwd").read_text() == users, "the machine itself is unchanged"
