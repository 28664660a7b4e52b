"""Users of the HTTP server: tokens of programs, one-time addresses and sessions of people.

Rule 1: a token is random, so its SHA-256 digest is stored, as for session keys. The token itself is shown once.
Rule 2: a one-time address is signed, expires, and is accepted once: its use is recorded in a file, which is created
before the session. It becomes a session in a cookie that scripts and other sites cannot read.
Rule 3: removing the file of the key ends all sessions, and makes all one-time addresses invalid.
Rule 4: nothing here writes a token, a key or a session to a log or into an error.
"""

import hmac
import json
import os
import re
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.locks import exclusive_lock
from fleetpulse.io.system.secret_files import create_secret, write_secret

TOKEN_PREFIX: Final = "fleet_"  # noqa: S105 - not a password: it lets scanners for secrets find a token
LOGIN_S: Final = 600  # validity of a one-time address
SESSION_S: Final = 12 * 3_600
_MAX_EXPIRY_DIGITS: Final = 12
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")  # as of users of the broker


class WebRole(StrEnum):
    """What a user of the HTTP server may do."""

    API_READER = "api-reader"  # a program: read the API and the metrics
    VIEWER = "viewer"  # a person: read the API, the metrics and the page
    OPERATOR = "operator"  # also start actions


@dataclass(frozen=True, slots=True)
class User:
    """User of a request.

    Attributes:
        name: name of the user, or of the token.
        role: what the user may do.
    """

    name: str
    role: WebRole


@dataclass(frozen=True, slots=True)
class Token:
    """Stored token of a program.

    Attributes:
        name: name of the program.
        role: what it may do.
        digest: SHA-256 of the token, hexadecimal.
        created_ms: instant of its creation, epoch milliseconds.
    """

    name: str
    role: WebRole
    digest: str
    created_ms: int


def _folder(home: Home) -> Path:
    folder = home.path / "web"
    folder.mkdir(0o700, parents=True, exist_ok=True)
    return folder


def _key(home: Home) -> bytes:
    return create_secret(_folder(home) / "session.key", secrets.token_hex(32)).encode()


def tokens(home: Home) -> list[Token]:
    """Return the stored tokens, ordered by name.

    Raises:
        FleetError: the file is damaged.
    """
    path = home.path / "web" / "tokens.json"
    try:
        return [Token(**{**one, "role": WebRole(one["role"])}) for one in json.loads(path.read_text())]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError) as error:
        raise FleetError(
            f'"{path}" is damaged ({error}); remove it, and grant the programs access again', code="tokens-damaged"
        ) from None


def grant_token(home: Home, name: str, role: WebRole, now_ms: int) -> str:
    """Create and store a program's token, replacing the one of the same name.

    Args:
        home: home of the server.
        name: name of the program: letters, digits and ``. _ : @ -``.
        role: rights of the program.
        now_ms: instant of the creation, epoch milliseconds.

    Raises:
        FleetError: the name is malformed, or the stored tokens are damaged.
    """
    if not _NAME.fullmatch(name):
        raise FleetError(
            f"the name of a program has 1 to 128 letters, digits and . _ : @ -, and starts with a letter or digit; got {name!a}; "
            f'write a name such as "grafana"',
            code="token-name-invalid",
        )
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    with exclusive_lock(_folder(home) / "tokens.lock"):
        kept = [one for one in tokens(home) if one.name != name]
        _write(home, [*kept, Token(name, role, _digest(token), now_ms)])
    return token


def revoke_token(home: Home, name: str) -> bool:
    """Remove the token of a program; return whether there was one.

    A running server refuses the token from the next request on.
    """
    with exclusive_lock(_folder(home) / "tokens.lock"):
        known = tokens(home)
        kept = [one for one in known if one.name != name]
        if len(kept) == len(known):
            return False
        _write(home, kept)
    return True


def _write(home: Home, known: list[Token]) -> None:
    ordered = sorted(known, key=lambda one: one.name)
    write_secret(_folder(home) / "tokens.json", json.dumps([asdict(one) for one in ordered], indent=1) + "\n")


def _digest(token: str) -> str:
    return sha256(token.encode()).hexdigest()


def login_key(home: Home, user: str = "viewer", now_s: float | None = None) -> str:
    """Return the key of a one-time address, which is valid for `LOGIN_S` seconds."""
    until_s = int(time.time() if now_s is None else now_s) + LOGIN_S
    return _signed(home, "login", until_s, f"{user}.{secrets.token_hex(8)}")


def login_address(home: Home, url: str) -> str:
    """Return a new one-time address of the server at ``url``."""
    return f"{url}/login?key={login_key(home)}"


def _is_first_use(home: Home, key: str, now_s: float) -> bool:
    """Record the use of a one-time key; return whether it was not used before.

    The record, an empty file, also holds for a server that is started again.
    """
    folder = _folder(home) / "used"
    folder.mkdir(0o700, exist_ok=True)
    for old in folder.iterdir():
        with suppress(FileNotFoundError):  # another login removed it
            if old.stat().st_mtime < now_s - LOGIN_S:
                old.unlink()
    record = folder / _digest(key)
    try:
        record.touch(0o600, exist_ok=False)
    except FileExistsError:
        return False
    os.utime(record, (now_s, now_s))
    return True


def _signed(home: Home, purpose: str, until_s: int, text: str) -> str:
    content = f"{until_s:x}.{text}"
    return f"{content}.{hmac.new(_key(home), f'{purpose} {content}'.encode(), 'sha256').hexdigest()}"


def _verified(home: Home, purpose: str, given: str, now_s: float) -> str | None:
    """Return the text that was signed for a purpose; None if it is forged or has expired."""
    until, _, rest = given.partition(".")
    text, _, _ = rest.rpartition(".")
    if len(until) > _MAX_EXPIRY_DIGITS or not given.isascii():
        return None
    try:
        until_s = int(until, 16)
    except ValueError:
        return None
    is_valid = hmac.compare_digest(given.encode(), _signed(home, purpose, until_s, text).encode())
    return text if is_valid and now_s < until_s else None


class Access:
    """Authentication of requests to the server of a home.

    Args:
        home: home with the tokens and the key.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._tokens: tuple[tuple[int, int], dict[str, Token]] = ((0, 0), {})  # by digest, with the identity of their file
        self.cookie: Final = f"fleet_session_{_digest(str(home.path.resolve()))[:12]}"
        """Name of the cookie of a session; that of another home differs, since browsers share cookies among ports."""

    def by_token(self, token: str) -> User | None:
        """Return the user of a token; None if it is unknown."""
        found = self._known_tokens().get(_digest(token))
        return None if found is None else User(found.name, found.role)

    def _known_tokens(self) -> dict[str, Token]:
        try:
            file = (self._home.path / "web" / "tokens.json").stat()
        except FileNotFoundError:
            return {}
        identity = file.st_mtime_ns, file.st_ino
        if identity != self._tokens[0]:
            self._tokens = identity, {one.digest: one for one in tokens(self._home)}
        return self._tokens[1]

    def log_in(self, key: str, now_s: float | None = None) -> str | None:
        """Exchange the key of a one-time address for a session; None if it is invalid or was used."""
        at_s = time.time() if now_s is None else now_s
        text = _verified(self._home, "login", key, at_s)
        if text is None or not _is_first_use(self._home, key, at_s):
            return None
        return _signed(self._home, "session", int(at_s) + SESSION_S, text)

    def by_session(self, cookie: str, now_s: float | None = None) -> User | None:
        """Return the user of a session; None if it is invalid or has expired."""
        text = _verified(self._home, "session", cookie, time.time() if now_s is None else now_s)
        return None if text is None else User(text.partition(".")[0], WebRole.VIEWER)
