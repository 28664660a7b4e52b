"""Compilation of the Scala peers in ``bench/peers/scala`` into a cached JAR."""

import os
import subprocess
from pathlib import Path
from typing import Final

import pyspark

from bench.lifecycle.generate import fingerprint
from fleetpulse.core.errors import FleetError
from fleetpulse.io.spark.jars import Jar, resolve_jars
from fleetpulse.io.spark.java import find_java
from fleetpulse.paths import cache_dir

SOURCES: Final = Path(__file__).parent / "scala"
COMPILER: Final = Jar(  # Scala version of pyspark 4.2
    "org.scala-lang",
    "scala-compiler",
    "2.13.18",
    "2f15891fcae7aad30a3892194fb2abb6224cf7ce5d2bd90fba7f1c48682fca21",
)
_LIMIT_S: Final = 300


def compiled() -> Path:
    """Return the JAR of the peers; compile it if the cache has none of these sources.

    Raises:
        FleetError: the compiler cannot be downloaded, or reports errors.
    """
    sources = sorted(SOURCES.glob("*.scala"))
    target = cache_dir() / "bench" / f"peers-{COMPILER.version}-{pyspark.__version__}-{fingerprint(*sources)}.jar"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        _compile(sources, target)
    return target


def _compile(sources: list[Path], target: Path) -> None:
    jars = Path(pyspark.__file__).parent / "jars"
    shipped = jars / COMPILER.name  # the same file as on Maven Central; downloaded only if pyspark lacks it
    compiler = shipped if shipped.exists() else resolve_jars(jars=[COMPILER])[0]
    tools = [compiler, *jars.glob("scala-library-*.jar"), *jars.glob("scala-reflect-*.jar")]
    fresh = target.with_name(f".{os.getpid()}-{target.name}")
    command = [find_java() / "bin" / "java", "-Xss8m", "-Xmx1g", "-cp", os.pathsep.join(map(str, tools)), "scala.tools.nsc.Main"]
    command += ["-nobootcp", "-opt:local", "-deprecation", "-Werror", "-cp", os.pathsep.join(map(str, jars.glob("*.jar")))]
    done = subprocess.run([*command, "-d", fresh, *sources], capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise FleetError(f"scalac cannot compile the peers:\n{done.stdout}{done.stderr}", code="compiler-failed")
    fresh.replace(target)
