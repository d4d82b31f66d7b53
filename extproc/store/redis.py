"""Opens a Redis or Valkey store by its URL: a single server, Sentinel or Cluster.

Option names are redis-py's.
"""
# interpreted: used only at the start

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio.connection import parse_url
from redis.exceptions import RedisError

from extproc.errors import UsageError
from extproc.metrics import Metrics
from extproc.settings import Settings
from extproc.store import redact_url
from extproc.store.client import Access, make_access
from extproc.store.credentials import FileCredentials, ProvidedCredentials
from extproc.store.link import ServerAddress
from extproc.store.remote import RemoteStore
from extproc.store.topology import ClusterLayout, Layout

TAGS = 16
"""Default number of hash tags: few commands for each batch, but keys on every primary."""

MAX_TAGS = 256
"""Every key ends in two hex digits, which select its tag."""

DEFAULT_PREFIX = "loopguard:"

_OWN = ("prefix", "credential_provider", "client")
_REDIS_PY = (
    "username",
    "password",
    "protocol",
    "client_name",
    "socket_connect_timeout",
    "socket_keepalive",
    "health_check_interval",
)
"""Supported options of redis-py.

Options for retries are not, because a command that is sent twice may count twice.
"""

_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_TLS = (
    *_FILES,
    "ssl_password",
    "ssl_ca_path",
    "ssl_ca_data",
    "ssl_cert_reqs",
    "ssl_check_hostname",
    "ssl_min_version",
    "ssl_ciphers",
    "ssl_include_verify_flags",
    "ssl_exclude_verify_flags",
)


class _StoreUrl:
    """A parsed store URL; raises UsageError if it is invalid."""

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            parts = urlsplit(url)
            self.scheme, _, self.kind = parts.scheme.partition("+")
            secret, at, listed = parts.netloc.rpartition("@")
            read = parse_url(f"{self.scheme}://{secret}{at}?{parts.query}")
        except ValueError as error:
            raise self.explain(
                "a character is invalid" if "netloc" in str(error) else str(error)
            ) from None
        self.hosts = [self._parse_place(item) for item in listed.split(",") if item]
        self.path = unquote(parts.path.strip("/"))
        if parts.fragment:
            raise self.explain("it must not contain #; in a password, write %23")
        own = (*_OWN, *(("tags",) if self.kind == "cluster" else ("db",)))
        known = (*own, *_REDIS_PY, *(_TLS if self.scheme == "rediss" else ()))
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        if any(name not in known for name in given):
            raise self.explain(f"unknown option; known options: {', '.join(known)}")
        self.own = {name: value for name, value in given.items() if name in own}
        self.arguments = {
            name: value for name, value in read.items() if name not in (*own, "connection_class")
        }

    def _parse_place(self, text: str) -> ServerAddress:
        try:
            parts = urlsplit(f"//{text}")
            port = parts.port or (26_379 if self.kind == "sentinel" else 6379)
            return ServerAddress(parts.hostname or "localhost", port)
        except ValueError:
            raise self.explain("the part after :// must be HOST:PORT") from None

    def parse_number(self, text: str, what: str, least: int = 0) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) < least:
            raise self.explain(f"{what} must be an integer of at least {least}")
        return int(text)

    def make_access(self, database: str = "") -> Access:
        """How to connect to its servers; `database` comes from the path."""
        given = self.arguments
        if number := self.parse_number(database or self.own.get("db", "0"), "the database"):
            given["db"] = number
        for name in _FILES:
            if name in given and not Path(str(given[name])).is_file():
                raise self.explain(f"{name}: no such file: {given[name]}")
        if "ssl_keyfile" in given and "ssl_certfile" not in given:
            raise self.explain("ssl_keyfile needs ssl_certfile")
        client = self.own.get("client", "")
        if client not in ("", "redis-py"):
            raise self.explain(
                "client must be redis-py; without it, requests use Loopguard's own connection, "
                "which needs less CPU"
            )
        try:
            return make_access(self.scheme, given, library=client != "")
        except OSError as error:
            raise self.explain(
                "the TLS files must be valid PEM, and the key must match the certificate "
                f"({error.strerror or error})"
            ) from None
        except (RedisError, TypeError, ValueError) as error:
            raise self.explain(str(error)) from None

    def choose_credentials(self, settings: Settings) -> None:
        """Add the credential provider, or the settings' password if the URL has none."""
        given, file = self.arguments, settings.store_password_file
        name = self.own.get("credential_provider")
        user = str(given.get("username", ""))
        credentials = FileCredentials(user, file) if file else None
        password = given.get("password") or (settings.store_password if credentials is None else "")
        if name is not None:
            if user or password or file:
                raise self.explain(
                    "give either credential_provider or a user and password, not both"
                )
            given["credential_provider"] = ProvidedCredentials(name)
        elif password:
            given["password"] = password
        elif credentials is not None and (credentials.has_password or not user):
            given.pop("username", None)
            given["credential_provider"] = credentials
        elif user:
            raise self.explain(
                "a user needs a password, here as USER:PASSWORD@, in LOOPGUARD_STORE_PASSWORD or "
                "in --store-password-file"
            )

    def explain(self, message: str) -> UsageError:
        """An error about this URL, without its password."""
        return UsageError(f"cannot use store {redact_url(self._url)}: {message}")


def open_redis(url: str, metrics: Metrics, settings: Settings) -> RemoteStore:
    """Open `redis://`, `rediss://` or `unix://`, with `+sentinel` or `+cluster`.

    Raises:
        UsageError: the URL is invalid.
    """
    parts = _StoreUrl(url)
    parts.choose_credentials(settings)
    layout = _LAYOUTS[parts.kind if parts.scheme != "unix" else "unix"](parts)
    whole = settings.on_store_error == "reject"
    prefix = parts.own.get("prefix", DEFAULT_PREFIX)
    return RemoteStore(layout, prefix, metrics, settings.store_timeout, whole=whole)


def _make_single(url: _StoreUrl) -> Layout:
    if len(url.hosts) != 1:
        raise url.explain(
            "it takes one HOST:PORT; for several use redis+sentinel:// or redis+cluster://"
        )
    access = url.make_access(url.path)
    return Layout(str(url.hosts[0]), access, access.make_pool(url.hosts[0]))


def _make_unix(url: _StoreUrl) -> Layout:
    if url.hosts or not url.path:
        raise url.explain("it takes the form unix:///PATH?db=0")
    place = ServerAddress(path=f"/{url.path}")
    access = url.make_access()
    return Layout(str(place), access, access.make_pool(place))


def _make_sentinel(url: _StoreUrl) -> Layout:
    service, _, database = url.path.partition("/")
    if not url.hosts or not service:
        raise url.explain(
            f"it takes the form {url.scheme}+sentinel://HOST1:PORT,HOST2:PORT/SERVICE"
        )
    access = url.make_access(database)
    return Layout(service, access, access.find_primary(url.hosts, service))


def _make_cluster(url: _StoreUrl) -> Layout:
    if not url.hosts or url.path not in ("", "0"):
        raise url.explain(
            f"it takes the form {url.scheme}+cluster://HOST1:PORT,HOST2:PORT (a cluster has no "
            "databases)"
        )
    if "{" in url.own.get("prefix", ""):
        raise url.explain(
            "the prefix must not contain {, because Loopguard chooses the hash tags of a "
            "cluster's keys"
        )
    tags = url.parse_number(url.own.get("tags", str(TAGS)), "tags", 1)
    if tags > MAX_TAGS or tags & (tags - 1):
        raise url.explain(f"tags must be a power of two up to {MAX_TAGS}")
    return ClusterLayout(url.hosts, url.make_access(), tags)


_LAYOUTS: Mapping[str, Callable[[_StoreUrl], Layout]] = {
    "": _make_single,
    "unix": _make_unix,
    "sentinel": _make_sentinel,
    "cluster": _make_cluster,
}
