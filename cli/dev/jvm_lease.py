"""Process in place of a driver's JVM: it leases a warm JVM of the pool until its standard input closes.

PySpark starts a JVM through Spark's script ``spark-class``; in tests, Bash starts this process instead, see
`cli.dev.jvm_pool`. It writes port and secret of the leased JVM to the file that PySpark reads. Like
a JVM, it ends when its standard input closes. It becomes the requested JVM without the pool, on a
cluster, and if the JVM writes the archive of classes.

Rule: this module runs isolated from the installation, and imports the standard library only.
"""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Final, NoReturn

LEASES_JVMS: Final = "BASH_ENV"  # names a file that Bash reads before each script
LEASES: Final = "leases"  # file in the folder of a part: the CPU seconds of each ended lease
SOCKET: Final = "FLEET_TEST_JVMS"
CONNECTION: Final = "_PYSPARK_DRIVER_CONN_INFO_PATH"  # file that a JVM of PySpark writes when it is ready


def _become_jvm(command: list[str]) -> NoReturn:
    environment = {name: value for name, value in os.environ.items() if name != LEASES_JVMS}
    os.execve(command[0], command, environment)  # noqa: S606 - the command is that of PySpark


def _needs_its_own(command: list[str]) -> bool:
    """Return whether the session is on a cluster, or its JVM writes the archive of classes when it ends."""
    on_cluster = any(one.startswith("spark.master=") and not one.startswith("spark.master=local[") for one in command)
    return on_cluster or any("-XX:ArchiveClassesAtExit" in one for one in command)


def main(command: list[str]) -> None:
    """Lease a JVM for the command line of ``spark-class``."""
    if _needs_its_own(command):
        _become_jvm(command)
    pool = socket.socket(socket.AF_UNIX)
    try:
        pool.connect(os.environ[SOCKET])
    except (KeyError, OSError):
        _become_jvm(command)
    request = json.dumps({"command": command, "environment": dict(os.environ)}).encode()
    socket.send_fds(pool, [len(request).to_bytes(4, "big")], [sys.stdout.fileno()])
    pool.sendall(request)
    answer = pool.makefile("rb").readline()
    if not answer:
        raise SystemExit(
            f"the pool of JVMs, or the JVM that it started, has ended; see the output above; without the variable "
            f"{LEASES_JVMS}, the JVM starts outside the pool"
        )
    leased = json.loads(answer)
    secret = leased["secret"].encode()
    path = Path(os.environ[CONNECTION])
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(leased["port"].to_bytes(4, "big") + len(secret).to_bytes(4, "big") + secret)
    temporary.replace(path)  # PySpark reads the file as soon as it exists
    while os.read(sys.stdin.fileno(), 4096):
        pass


if __name__ == "__main__":
    main(sys.argv[1:])
