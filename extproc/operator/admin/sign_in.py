"""Signs operators in to the pages with a token of `--admin-token-file`.

A signed-in browser has a cookie: an end, a random number, a name, and a keyed hash of these and of
the token. Nothing is stored, so every replica that shares the hash key and the tokens accepts it,
and removing the token from the file ends it. The cookie does not reveal the token, scripts cannot
read it (HttpOnly), and other sites' requests do not carry it (SameSite=Strict).

Each form carries a keyed hash of the cookie, so that only a page of this server can have made it.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections import deque
from http import HTTPStatus
from threading import Lock
from time import monotonic, time
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from extproc.logs import make_extra
from extproc.operator.admin.credentials import Credentials, clean_name
from extproc.request.hash_key import HashKey

_LOG = logging.getLogger("loopguard")

_COOKIE = "loopguard_operator"
_SIGNED_IN_SECONDS = 8 * 3_600
"""A shift. Orders need a new sign-in after it."""

_DIGEST = 32
_MAX_FAILURES = 5
_FAILURE_SECONDS = 60
_MAX_CLIENTS = 1_024
"""Addresses whose failures are remembered; beyond, the oldest is forgotten."""

_OFF = "this server takes no orders from browsers: start it with --admin-token-file"


class Operator(NamedTuple):
    """A signed-in operator.

    Attributes:
        name: as claimed at the sign-in.
        form_key: the secret that forms of this operator carry.
    """

    name: str
    form_key: str


class SignIn:
    """Signs operators in and recognizes them. Its methods block while they read the token file."""

    def __init__(self, credentials: Credentials, key: HashKey) -> None:
        self._credentials = credentials
        self._key = key
        self._attempts: dict[str, deque[float]] = {}
        self._lock = Lock()

    def check_enabled(self) -> None:
        """Raise HTTPException (403) unless operators can sign in."""
        if not self._credentials.signs_in:
            raise HTTPException(HTTPStatus.FORBIDDEN, _OFF)

    def find(self, request: Request) -> Operator | None:
        """The operator whose browser sent a request; None if it is not signed in."""
        cookie = request.cookies.get(_COOKIE, "")
        parts = cookie.split(".", 3)
        if len(parts) != 4 or not self._credentials.signs_in:  # noqa: PLR2004  # as `open` joins
            return None
        ends, nonce, given, name = parts
        # Constant time: always compare with all tokens
        known = [
            hmac.compare_digest(
                given.encode(), self._sign_cookie(ends, nonce, name, token).encode()
            )
            for token in self._credentials.list_tokens()
        ]
        if not any(known) or time() >= int(ends):
            return None
        return Operator(unquote(name), self._sign(b"form", cookie.encode()))

    def open(self, request: Request, name: str, token: str, response: Response) -> None:
        """Sign in: set the cookie on `response`.

        Raises HTTPException: 401 for a wrong token, 429 after too many of them.
        """
        client = request.client.host if request.client is not None else ""
        self._count_attempt(client)
        name, given = clean_name(name), token.strip().encode("utf-8", "surrogateescape")
        good = [
            known for known in self._credentials.list_tokens() if hmac.compare_digest(given, known)
        ]
        if not good:
            _LOG.warning("sign-in refused", extra=make_extra(who=name, client=client))
            raise HTTPException(
                HTTPStatus.UNAUTHORIZED, "this is not a token of --admin-token-file"
            )
        with self._lock:
            self._attempts.pop(client, None)
        _LOG.info("signed in", extra=make_extra(who=name, client=client))
        ends, nonce = str(int(time()) + _SIGNED_IN_SECONDS), secrets.token_hex(16)
        written = quote(name, safe="")
        signed = self._sign_cookie(ends, nonce, written, good[0])
        response.set_cookie(
            _COOKIE,
            f"{ends}.{nonce}.{signed}.{written}",
            max_age=_SIGNED_IN_SECONDS,
            secure=urlsplit(request.headers.get("origin", "")).scheme == "https",
            httponly=True,
            samesite="strict",
        )

    def _count_attempt(self, client: str) -> None:
        """Count an attempt before its token is compared, so that concurrent ones count."""
        now = monotonic()
        with self._lock:
            attempts = self._attempts.pop(client, None) or deque(maxlen=_MAX_FAILURES)
            self._attempts[client] = attempts
            if len(self._attempts) > _MAX_CLIENTS:
                del self._attempts[next(iter(self._attempts))]
            if len(attempts) == _MAX_FAILURES and now - attempts[0] < _FAILURE_SECONDS:
                wait = int(attempts[0] + _FAILURE_SECONDS - now) + 1
                raise HTTPException(
                    HTTPStatus.TOO_MANY_REQUESTS,
                    f"too many wrong tokens from your address: try again in {wait} s",
                    {"retry-after": str(wait)},
                )
            attempts.append(now)

    def close(self, response: Response) -> None:
        """Sign out: remove the cookie."""
        response.delete_cookie(_COOKIE, httponly=True, samesite="strict")

    def _sign_cookie(self, ends: str, nonce: str, name: str, token: bytes) -> str:
        return self._sign(b"cookie", f"{ends}.{nonce}.{name}\n".encode() + token)

    def _sign(self, purpose: bytes, text: bytes) -> str:
        digest = self._key.start(b"operator " + purpose, _DIGEST)
        digest.update(text)
        return digest.hexdigest()


def check_origin(request: Request) -> None:
    """Raise HTTPException (403) unless a form was sent by a page of this server.

    Browsers send `Sec-Fetch-Site` over https and to this machine, and `Origin` with every form.
    """
    site = request.headers.get("sec-fetch-site")
    origin = urlsplit(request.headers.get("origin", "")).netloc
    own = site == "same-origin" if site else origin and origin == request.headers.get("host")
    if not own:
        raise HTTPException(
            HTTPStatus.FORBIDDEN, "this form was not sent by a page of this server: nothing changed"
        )


def check_form(operator: Operator, given: str) -> None:
    """Raise HTTPException (403) unless a form was made for this sign-in."""
    if not hmac.compare_digest(given.encode(), operator.form_key.encode()):
        raise HTTPException(
            HTTPStatus.FORBIDDEN,
            "this form is older than your sign-in: nothing changed. Go back and open it again",
        )
