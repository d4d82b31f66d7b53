"""URLs of stores. Messages about a wrong one leave out its password."""

from pathlib import Path

import pytest

from extproc.errors import UsageError
from extproc.metrics import Metrics
from extproc.settings import Settings
from extproc.store import open_store, redact_url
from extproc.store.remote import RemoteStore

SECRET = "hunter2"


_KNOWN = (
    "known schemes: memory://, redis://, rediss://, unix://, redis+sentinel://, "
    "rediss+sentinel://, redis+cluster://, rediss+cluster://"
)
BAD_URLS = [
    (
        "memory://?max_entries=0",
        "'memory://?max_entries=0': max_entries must be a positive integer",
    ),
    ("memory://host", "'memory://host': it takes the form memory://?max_entries=1000000"),
    ("memory://?size=3", "'memory://?size=3': it takes the form memory://?max_entries=1000000"),
    (
        "redis://",
        "redis://: it takes one HOST:PORT; for several use redis+sentinel:// or redis+cluster://",
    ),
    (
        "redis://a,b",
        "redis://a,b: it takes one HOST:PORT; for several use redis+sentinel:// or redis+cluster://",
    ),
    ("redis://a:x", "redis://a:x: the part after :// must be HOST:PORT"),
    ("redis://a:70000", "redis://a:70000: the part after :// must be HOST:PORT"),
    ("redis://[::1", "redis://[::1: Invalid IPv6 URL"),
    ("redis://a/zero", "redis://a/zero: the database must be an integer of at least 0"),
    (
        "redis://a?x=1",
        "redis://a: unknown option; known options: prefix, credential_provider, client, db",
    ),
    (
        "redis://a?ssl_ca_certs=x",
        "redis://a: unknown option; known options: prefix, credential_provider, client, db",
    ),
    (
        "redis://a?connections=3",
        "redis://a: unknown option; known options: prefix, credential_provider, client, db",
    ),
    ("redis://a?protocol=5", "redis://a: protocol must be either 2 or 3"),
    ("redis://a?retry_on_timeout=true", "redis://a: unknown option; known options: prefix, "),
    (
        "redis://a?client=aioredis",
        "redis://a: client must be redis-py; without it, requests use Loopguard's own connection",
    ),
    ("redis://a?db=x", "redis://a: Invalid value for 'db' in connection URL."),
    (
        "rediss://a?ssl_cert_reqs=maybe",
        "rediss://a: Invalid SSL Certificate Requirements Flag: maybe",
    ),
    ("redis://a#b", "redis://a#b: it must not contain #; in a password, write %23"),
    ("rediss://a?ssl_ca_certs=/none", "rediss://a: ssl_ca_certs: no such file: /none"),
    (f"rediss://a?ssl_keyfile={__file__}", "rediss://a: ssl_keyfile needs ssl_certfile"),
    (
        f"rediss://a?ssl_ca_certs={__file__}",
        (
            "rediss://a: the TLS files must be valid PEM, and the key must match the certificate "
            "([X509"
        ),
    ),
    ("unix://", "unix://: it takes the form unix:///PATH?db=0"),
    ("unix://run/x.sock", "unix://run/x.sock: it takes the form unix:///PATH?db=0"),
    (
        "redis+sentinel://a",
        "redis+sentinel://a: it takes the form redis+sentinel://HOST1:PORT,HOST2:PORT/SERVICE",
    ),
    (
        "rediss+sentinel:///s",
        "rediss+sentinel:///s: it takes the form rediss+sentinel://HOST1:PORT,HOST2:PORT/SERVICE",
    ),
    (
        "redis+cluster://a/1",
        (
            "redis+cluster://a/1: it takes the form redis+cluster://HOST1:PORT,HOST2:PORT "
            "(a cluster has no databases)"
        ),
    ),
    ("redis+cluster://a?tags=17", "redis+cluster://a: tags must be a power of two up to 256"),
    ("redis+cluster://a?tags=512", "redis+cluster://a: tags must be a power of two up to 256"),
    (
        "redis+cluster://a?prefix={x}",
        (
            "redis+cluster://a: the prefix must not contain {, because Loopguard chooses the hash "
            "tags of a cluster's keys"
        ),
    ),
    (
        "redis://ann@a",
        (
            "redis://a: a user needs a password, here as USER:PASSWORD@, in "
            "LOOPGUARD_STORE_PASSWORD or in --store-password-file"
        ),
    ),
]


NO_STORES = [
    ("etcd://x", f"unknown store etcd://x; {_KNOWN}"),
    ("etcd://me:secret@x/y?z", f"unknown store etcd://x/y; {_KNOWN}"),
    ("memory", f"a store is given as a URL; {_KNOWN}"),
    ("me:secret@x", f"a store is given as a URL; {_KNOWN}"),
]


@pytest.mark.parametrize(
    ("url", "message"), [*NO_STORES, *((url, f"cannot use store {said}") for url, said in BAD_URLS)]
)
def test_invalid_url_is_explained(url: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        open_store(url, Metrics())

    assert str(error.value).startswith(message)


@pytest.mark.slow
@pytest.mark.parametrize(
    "password",
    [
        SECRET,
        f"{SECRET}/x",
        f"x?{SECRET}",
        f"x#{SECRET}",
        f"@{SECRET}@",
        f"[{SECRET}",
        f"{SECRET}:%zz",
    ],
)
@pytest.mark.parametrize(("url", "_"), BAD_URLS[3:-1])
def test_no_error_shows_the_password(url: str, _: str, password: str) -> None:
    scheme, _, rest = url.partition("://")
    url = f"{scheme}://ann:{password}@{rest}"

    with pytest.raises(UsageError) as error:
        open_store(url, Metrics())

    assert SECRET not in str(error.value)
    assert SECRET not in redact_url(url)


def test_unreadable_password_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        open_store("redis://a", Metrics(), Settings(store_password_file=str(tmp_path / "none")))

    assert str(error.value) == f"--store-password-file {tmp_path}/none: No such file or directory"


@pytest.mark.parametrize(
    ("url", "tags"),
    [
        ("redis+cluster://a", 16),
        ("redis+cluster://a?tags=64", 64),
        ("redis+cluster://a?tags=256", 256),
    ],
)
def test_number_of_hash_tags_is_an_option(url: str, tags: int) -> None:
    store = open_store(url, Metrics())

    assert isinstance(store, RemoteStore)
    assert len(set(store.tags)) == tags
