"""Opens a store in Redis or Valkey by its URL: one server, Sentinel or Cluster; TLS, ACL users, Unix sockets."""
# interpreted: used only at the start

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.credentials import CredentialProvider

from extproc.errors import UsageError
from extproc.metrics import Metrics
from extproc.settings import Settings
from extproc.store import redact_url
from extproc.store.client import Access
from extproc.store.credentials import PasswordCredentials, ProvidedCredentials
from extproc.store.link import ServerAddress
from extproc.store.remote import RemoteStore
from extproc.store.topology import ClusterLayout, Layout, SentinelServer, SingleLayout, SingleServer

TAGS = 16
"""Number of hash tags over which a cluster's keys are spread: a batch needs few commands, and still reaches every primary."""

MAX_TAGS = 256
"""Number of values of the two hex digits at the end of every key."""

DEFAULT_PREFIX = "loopguard:"


class _StoreUrl:
    """The parts of a store URL."""

    def __init__(self, url: str) -> None:
        """Take the URL apart; raises UsageError if part of it is invalid."""
        self._url = url
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise self.explain(str(error)) from None
        self.scheme, _, self.kind = parts.scheme.partition("+")
        secret, _, listed = parts.netloc.rpartition("@")
        user, _, password = secret.partition(":")
        self.user, self.password = unquote(user), unquote(password)
        self.hosts = [self._parse_place(item) for item in listed.split(",") if item]
        self.path = unquote(parts.path.strip("/"))
        self.options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if parts.fragment:
            raise self.explain("it must not contain #; in a password, write %23")
        own = ("db",) if self.scheme == "unix" else ("tags",) if self.kind == "cluster" else ()
        known = ("prefix", "credential_provider", *own, *(self.read_tls_options()))
        unknown = [name for name in self.options if name not in known]
        if unknown:
            raise self.explain(f"unknown option; known options: {', '.join(known)}")

    def read_tls_options(self) -> tuple[str, ...]:
        """The TLS options of the URL."""
        return ("ca", "cert", "key") if self.scheme == "rediss" else ()

    def _parse_place(self, text: str) -> ServerAddress:
        try:
            parts = urlsplit(f"//{text}")
            port = parts.port or (26_379 if self.kind == "sentinel" else 6379)
            return ServerAddress(parts.hostname or "localhost", port)
        except ValueError:
            raise self.explain("the part after :// must be HOST:PORT") from None

    def parse_number(self, text: str, what: str, least: int = 0) -> int:
        """An integer of the URL."""
        if not (text.isascii() and text.isdecimal()) or int(text) < least:
            raise self.explain(f"{what} must be a number from {least}")
        return int(text)

    def explain(self, message: str) -> UsageError:
        """An error about this URL, without its password."""
        return UsageError(f"cannot use store {redact_url(self._url)}: {message}")


def _choose_credentials(url: _StoreUrl, settings: Settings) -> CredentialProvider | None:
    """The URL's credentials, or the password in the URL or the settings; None if there is none."""
    name, file = url.options.get("credential_provider"), settings.store_password_file
    password = url.password or ("" if file else settings.store_password)
    if name is not None:
        if url.user or password or file:
            raise url.explain("credential_provider replaces user and password; give one or the other")
        return ProvidedCredentials(name)
    chosen = PasswordCredentials(url.user, password, file)
    if url.user and not chosen.has_password():
        raise url.explain(
            "a user needs a password, here as USER:PASSWORD@, in LOOPGUARD_STORE_PASSWORD or in --store-password-file"
        )
    return chosen if password or file else None


def _make_tls(url: _StoreUrl) -> ssl.SSLContext | None:
    if url.scheme != "rediss":
        return None
    given = [(name, url.options[name]) for name in url.read_tls_options() if name in url.options]
    for name, path in given:
        if not Path(path).is_file():
            raise url.explain(f"{name}: there is no file {path}")
    if "key" in url.options and "cert" not in url.options:
        raise url.explain("key needs cert")
    try:
        context = ssl.create_default_context(cafile=url.options.get("ca"))
        if "cert" in url.options:
            context.load_cert_chain(url.options["cert"], url.options.get("key"))
    except (ssl.SSLError, OSError) as error:
        raise url.explain(f"ca, cert and key must be PEM files that belong together ({error.strerror or error})") from None
    return context


def open_redis(url: str, metrics: Metrics, settings: Settings) -> RemoteStore:
    """Open `redis://`, `rediss://` or `unix://`, with `+sentinel` or `+cluster`, as docs/operations.md says.

    Raises:
        UsageError: the URL is invalid.
    """
    parts = _StoreUrl(url)
    prefix = parts.options.get("prefix", DEFAULT_PREFIX)
    access = Access(_choose_credentials(parts, settings), _make_tls(parts))
    layout = _LAYOUTS[parts.kind if parts.scheme != "unix" else "unix"](parts, access)
    whole = settings.on_store_error == "reject"
    return RemoteStore(layout, prefix, metrics, settings.store_timeout, whole=whole)


def _make_single(url: _StoreUrl, access: Access) -> Layout:
    if len(url.hosts) != 1:
        raise url.explain("it takes one HOST:PORT; for several use redis+sentinel:// or redis+cluster://")
    access = replace(access, database=url.parse_number(url.path or "0", "the database"))
    return SingleLayout(str(url.hosts[0]), lambda: SingleServer(url.hosts[0], access))


def _make_unix(url: _StoreUrl, access: Access) -> Layout:
    if url.hosts or not url.path:
        raise url.explain("it takes the form unix:///PATH?db=0")
    place = ServerAddress(path=f"/{url.path}")
    access = replace(access, database=url.parse_number(url.options.get("db", "0"), "db"))
    return SingleLayout(str(place), lambda: SingleServer(place, access))


def _make_sentinel(url: _StoreUrl, access: Access) -> Layout:
    service, _, database = url.path.partition("/")
    if not url.hosts or not service:
        raise url.explain(f"it takes the form {url.scheme}+sentinel://HOST1:PORT,HOST2:PORT/SERVICE")
    access = replace(access, database=url.parse_number(database or "0", "the database"))
    return SingleLayout(service, lambda: SentinelServer(url.hosts, service, access))


def _make_cluster(url: _StoreUrl, access: Access) -> Layout:
    if not url.hosts or url.path not in ("", "0"):
        raise url.explain(f"it takes the form {url.scheme}+cluster://HOST1:PORT,HOST2:PORT (a cluster has no databases)")
    if "{" in url.options.get("prefix", ""):
        raise url.explain("the prefix must not contain {: the hash tag of a cluster's keys is Loopguard's")
    tags = url.parse_number(url.options.get("tags", str(TAGS)), "tags", 1)
    if tags > MAX_TAGS or tags & (tags - 1):
        raise url.explain(f"tags must be a power of two up to {MAX_TAGS}")
    return ClusterLayout(url.hosts, access, tags)


_LAYOUTS: Mapping[str, Callable[[_StoreUrl, Access], Layout]] = {
    "": _make_single,
    "unix": _make_unix,
    "sentinel": _make_sentinel,
    "cluster": _make_cluster,
}
