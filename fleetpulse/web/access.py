"""Users of the HTTP server: tokens of programs, one-time addresses and sessions of people.

Rule 1: a token is random, so its SHA-256 digest is stored, as for session keys. The token itself is shown once.
Rule 2: a one-time address is signed, expires, and is accepted once by a running server. It becomes a session in a
cookie that scripts and other sites cannot read.
Rule 3: removing the key file and starting the server again ends all sessions.
"""

import hmac
import json
import secrets
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.secret_files import create_secret, write_secret

TOKEN_PREFIX: Final = "fleet_"  # noqa: S105 - not a password: it lets scanners for secrets find a token
LOGIN_S: Final = 600  # validity of a one-time address
SESSION_S: Final = 12 * 3_600
_MAX_EXPIRY_DIGITS: Final = 12


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
    return home.path / "web"


def _key(home: Home) -> bytes:
    _folder(home).mkdir(0o700, parents=True, exist_ok=True)
    return create_secret(_folder(home) / "session.key", secrets.token_hex(32)).encode()


def tokens(home: Home) -> list[Token]:
    """Return the stored tokens, ordered by name.

    Raises:
        FleetError: the file is damaged.
    """
    path = _folder(home) / "tokens.json"
    try:
        return [Token(**{**one, "role": WebRole(one["role"])}) for one in json.loads(path.read_text())]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError) as error:
        raise FleetError(
            f'"{path}" is damaged ({error}); remove it, and grant the programs access again', code="tokens-damaged"
        ) from None


def grant_token(home: Home, name: str, role: WebRole, now_ms: int) -> str:
    """Store a token for a program, and return it; it replaces an earlier one of that name."""
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    kept = [one for one in tokens(home) if one.name != name]
    _write(home, [*kept, Token(name, role, _digest(token), now_ms)])
    return token


def revoke_token(home: Home, name: str) -> bool:
    """Remove the token of a program; return whether there was one."""
    known = tokens(home)
    kept = [one for one in known if one.name != name]
    if len(kept) == len(known):
        return False
    _write(home, kept)
    return True


def _write(home: Home, known: list[Token]) -> None:
    _folder(home).mkdir(0o700, parents=True, exist_ok=True)
    ordered = sorted(known, key=lambda one: one.name)
    write_secret(_folder(home) / "tokens.json", json.dumps([asdict(one) for one in ordered], indent=1) + "\n")


def _digest(token: str) -> str:
    return sha256(token.encode()).hexdigest()


def login_key(home: Home, user: str = "viewer", now_s: float | None = None) -> str:
    """Return the key of a one-time address, which is valid for `LOGIN_S` seconds."""
    until_s = int(time.time() if now_s is None else now_s) + LOGIN_S
    return _signed(home, "login", until_s, f"{user}.{secrets.token_hex(8)}")


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
        self._used: dict[str, float] = {}  # one-time keys by the time of their use
        self._tokens: tuple[float, dict[str, Token]] = (-1.0, {})

    def by_token(self, token: str) -> User | None:
        """Return the user of a token; None if it is unknown."""
        found = self._known_tokens().get(_digest(token))
        return None if found is None else User(found.name, found.role)

    def _known_tokens(self) -> dict[str, Token]:
        try:
            changed = (_folder(self._home) / "tokens.json").stat().st_mtime_ns
        except FileNotFoundError:
            return {}
        if changed != self._tokens[0]:
            self._tokens = changed, {one.digest: one for one in tokens(self._home)}
        return self._tokens[1]

    def log_in(self, key: str, now_s: float | None = None) -> str | None:
        """Exchange the key of a one-time address for a session; None if it is invalid or was used."""
        at_s = time.time() if now_s is None else now_s
        text = _verified(self._home, "login", key, at_s)
        self._used = {one: used_s for one, used_s in self._used.items() if used_s > at_s - LOGIN_S}
        if text is None or key in self._used:
            return None
        self._used[key] = at_s
        return _signed(self._home, "session", int(at_s) + SESSION_S, text)

    def by_session(self, cookie: str, now_s: float | None = None) -> User | None:
        """Return the user of a session; None if it is invalid or has expired."""
        text = _verified(self._home, "session", cookie, time.time() if now_s is None else now_s)
        return None if text is None else User(text.partition(".")[0], WebRole.VIEWER)
