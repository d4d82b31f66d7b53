"""The Redis store beyond counting, on one real server.

URLs, secrets, the wire, batches, certainty, and how it heals.
"""

import asyncio
import logging
import re
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event, Semaphore
from time import perf_counter
from typing import Any, cast

import hiredis
import pytest
import trustme
from hypothesis import given, strategies as st
from redis.credentials import CredentialProvider

from extproc.errors import StoreError, UsageError
from extproc.metrics import Metrics
from extproc.settings import Settings
from extproc.store import known_refusals, open_store
from extproc.store.backend import RedisBackend, write_keys
from extproc.store.client import make_access
from extproc.store.credentials import ProvidedCredentials
from extproc.store.known_refusals import KnownRefusals
from extproc.store.link import ServerAddress
from extproc.store.pending import Pending
from extproc.store.rules.documents import BOARDS, KINDS, ORDERS
from extproc.store.rules.session import Step
from extproc.store.rules.tree import AgentLimits
from extproc.store.rules.windows import Count, Hit
from extproc.store.scripts import count_call, write_word
from extproc.store.shard import MAX_BATCH, Shard
from extproc.store.topology import Layout, ShardServers
from tests.support import ROOT
from tests.support.budgets import make_breaker
from tests.support.chains import Sent, make_link, place_link
from tests.support.harness import PATIENCE, eventually
from tests.support.ledger import NO_LIMITS, limit, make_record, make_step, settle_step
from tests.support.records import replace
from tests.support.servers import ACL, Driver, Server, altered, impostor, listening, relay, server
from tests.support.trees import ask_in_tree
from tests.support.windows import WINDOW_TYPES, cooldown_hits, make_hit, make_push, oracle

SECRET = "hunter2"
LIBRARY = "client=redis-py"
CLIENTS = ("", f"?{LIBRARY}")
LONG = make_hit(window_ms=600_000)


@pytest.fixture(scope="module")
def one() -> Iterator[Server]:
    with server() as made:
        yield made


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def driver(one: Server) -> Iterator[Driver]:
    with Driver(f"redis://{one.address}") as made:
        yield made


@pytest.fixture
def either(one: Server, client: str) -> Iterator[Driver]:
    """A store by each of the clients, for what depends on who sends and receives."""
    with Driver(f"redis://{one.address}{client}") as made:
        yield made


# --- URLs, users and passwords


def test_documented_urls_and_rights_are_valid() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    urls = re.findall(r"`((?:redis|unix)[+a-z]*://[0-9/][^`]*)`", page)

    for url in urls:
        open_store(url, Metrics())
    assert len(urls) == 4
    assert f"`{ACL}`" in page


@pytest.mark.parametrize(
    ("url", "database", "prefix"),
    [
        ("redis://{0.address}", 0, "loopguard:"),
        ("redis://{0.address}/3?prefix=mine-", 3, "mine-"),
        ("redis://{0.address}?prefix=&db=4", 4, ""),
        ("unix://{0.socket}?db=2", 2, "loopguard:"),
    ],
)
def test_keys_have_the_prefix_and_database_of_their_url(
    one: Server, url: str, database: int, prefix: str
) -> None:
    """They are named as `explain` shows them; the connection says nothing about itself."""
    with Driver(url.format(one)) as driver:
        assert driver.count([make_hit()])[0].count == 1

        clients = [client for client in one.client().client_list() if client["cmd"] == "evalsha"]
        assert one.client(db=database).exists(prefix + driver.key(make_hit()))
        assert {(client.get("lib-name", ""), client.get("resp", "2")) for client in clients} == {
            ("", "2")
        }


def test_url_options_are_those_of_redis_py(one: Server, client: str) -> None:
    with Driver(
        f"redis://{one.address}?{client.strip('?')}&protocol=3&client_name=loops&db=1&socket_connect_timeout=1"
    ) as driver:
        assert driver.count([make_hit()])[0].count == 1
        driver.put(BOARDS, driver.name("board"), "a", b"x", 60)

        assert {
            (found.get("resp", "3"), found["db"])
            for found in one.client().client_list()
            if found["name"] == "loops"
        } == {("3", "1")}
        assert driver.read(BOARDS, driver.name("board")) == {"a": b"x"}


def test_user_without_eval_gets_a_clear_error(one: Server, client: str) -> None:
    one.client().execute_command(
        "ACL", "SETUSER", "mute", "on", f">{SECRET}", *ACL.split(), "-eval", "-evalsha"
    )

    with Driver(f"redis://mute:{SECRET}@{one.address}{client}") as driver:
        assert re.fullmatch("unavailable: NOPERM .*evalsha.*", driver.store.health())
        assert driver.metric("store_errors_total", kind="auth") >= 1


def test_user_needs_only_documented_rights(one: Server) -> None:
    """All questions use only the commands that the docs list, on keys with the prefix."""
    one.client().execute_command("ACL", "SETUSER", "counter", "on", f">{SECRET}", *ACL.split())

    with Driver(f"redis://counter:{SECRET}@{one.address}") as driver:
        for now in range(0, 60_000, 3_000):
            driver.count(
                [make_hit(kind, key=kind, cooldown_ms=5_000) for kind in WINDOW_TYPES], now
            )
            entries = driver.push([make_push(str(now))], now)
            step = make_step(now, limit(max_sessions=1), key=f"session:{now}:7f")
            driver.account([step, settle_step(step)], now)
            driver.put(BOARDS, driver.name("board"), "a", b"x", 60, now)
            driver.read(BOARDS, driver.name("board"), now)
            driver.put(ORDERS, driver.name("book"), str(now), b"x", 5, now)
            driver.run(
                driver.store.documents.drop(ORDERS, driver.name("book"), str(now - 3_000), now)
            )
            driver.read(ORDERS, driver.name("book"), now)
            driver.run(driver.store.share_secret(driver.name("secret"), bytes(32)))

        assert (entries, driver.store.health()) == ([[b"51000", b"54000", b"57000"]], "ok")


PROVIDERS = f'''
from redis.credentials import CredentialProvider

class Rotating(CredentialProvider):
    """Each connect takes the next token, as a cloud's providers do."""
    tokens = iter(["first", "second"] * 2)
    def get_credentials(self):
        return "counter", next(self.tokens)

class Asynchronous(Rotating):
    async def get_credentials_async(self):
        return Rotating.get_credentials(self)
    def get_credentials(self):
        raise RuntimeError

class Failing(CredentialProvider):
    async def get_credentials_async(self):
        raise RuntimeError("no token for {SECRET}")

class Odd(Failing):
    async def get_credentials_async(self):
        return "{SECRET}"

def breaks():
    raise KeyError("{SECRET}")

nothing = 3
ready = Rotating()
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "lg_providers.py").write_text(PROVIDERS)
    (tmp_path / "lg_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    yield "lg_providers"
    sys.modules.pop("lg_providers", None)


@pytest.mark.parametrize("scheme", ["redis", "unix"])
@pytest.mark.parametrize("way", ["file", "Rotating", "Asynchronous", "ready"])
def test_changed_password_needs_no_restart(
    module: str, tmp_path: Path, way: str, scheme: str
) -> None:
    """A file, or a provider in the URL, is read at every connect."""
    file = tmp_path / "password"
    file.write_text("first\n")
    with server() as locked:
        admin = locked.client()
        admin.execute_command("ACL", "SETUSER", "counter", "on", ">first", *ACL.split())
        place = f"{scheme}://" + (locked.address if scheme == "redis" else locked.socket)
        settings = {}
        if way == "file":
            admin.execute_command("ACL", "SETUSER", "default", "resetpass", ">first")
            settings["store_password_file"] = str(file)
        else:
            place += f"?credential_provider={module}:{way}"
        with Driver(place, **settings) as driver:
            assert driver.count([LONG])[0].count == 1
            for user in ("counter", "default"):
                admin.execute_command("ACL", "SETUSER", user, "resetpass", ">second")
            file.write_text("second")
            admin.client_kill_filter(_type="normal", skipme=True)
            driver.run(asyncio.sleep(0.5))

            assert driver.count([LONG])[0].count == 2


def test_refused_login_never_shows_the_password() -> None:
    """Wherever it is refused; a server without AUTH even quotes the password in its error."""
    quoting = f"-ERR unknown command 'AUTH', with args beginning with: '{SECRET}'\r\n".encode()
    with server("--requirepass", "other") as locked, impostor(quoting) as address:
        for url in (
            f"redis://{address}",
            f"redis://{locked.address}",
            f"unix://{locked.socket}?db=1",
        ):
            with Driver(url, store_password=SECRET) as driver:
                assert driver.metric("store_errors_total", kind="auth") >= 1
                assert SECRET not in driver.store.health()
        # Not a secret
        with Driver(f"redis://{locked.address}", store_password="other") as driver:  # noqa: S106
            assert driver.store.health() == "ok"


@pytest.mark.parametrize(
    ("name", "what"),
    [("Failing", "raised RuntimeError"), ("Odd", "must return (PASSWORD,) or (USER, PASSWORD)")],
)
def test_failing_credential_provider_is_a_failed_login(
    module: str, name: str, what: str, one: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with Driver(f"redis://{one.address}?credential_provider={module}:{name}") as driver:
        assert driver.metric("store_errors_total", kind="auth") >= 1
        assert driver.store.health() == f"unavailable: credential provider {module}:{name} {what}"
    assert SECRET not in caplog.text


FORM = (
    "it takes MODULE:NAME, a redis.CredentialProvider, or a function without arguments that "
    "returns one"
)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere", "there is no colon between two names"),
        (":factory", "there is no colon between two names"),
        ("lg_nowhere:make", "cannot import lg_nowhere (No module named 'lg_nowhere')"),
        ("lg_broken:make", "importing lg_broken raised ZeroDivisionError"),
        ("lg_providers:make", "lg_providers has no make"),
        ("lg_providers:nothing", "nothing is not a function"),
        ("lg_providers:breaks", "calling it raised KeyError"),
        ("builtins:dict", "it returned dict"),
    ],
)
@pytest.mark.usefixtures("module")
def test_invalid_credential_provider_is_explained(name: str, why: str) -> None:
    with pytest.raises(UsageError) as error:
        open_store(f"redis://a?credential_provider={name}", Metrics())

    assert str(error.value) == f"credential_provider {name}: {why}; {FORM}"


@pytest.mark.parametrize(
    "settings", [Settings(store_password=SECRET), Settings(store_password_file=__file__)]
)
def test_credential_provider_excludes_a_password(module: str, settings: Settings) -> None:
    """A password beside a provider would be forgotten silently, so it is a usage error."""
    with pytest.raises(
        UsageError, match="give either credential_provider or a user and password, not both"
    ):
        open_store(f"redis://a?credential_provider={module}:Rotating", Metrics(), settings)


def test_blocking_credential_provider_delays_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked in a thread, and not again before it has answered."""
    asked, go_on = Semaphore(0), Event()

    class Blocking(CredentialProvider):
        def get_credentials(self) -> tuple[str]:
            asked.release()
            assert go_on.wait(PATIENCE)
            return (SECRET,)

    monkeypatch.setattr(sys.modules[__name__], "Blocking", Blocking, raising=False)

    async def ask() -> object:
        provider = ProvidedCredentials(f"{__name__}:Blocking")
        given_up, patient = (
            asyncio.create_task(provider.get_credentials_async()) for _ in range(2)
        )
        await asyncio.to_thread(asked.acquire)
        given_up.cancel()
        go_on.set()
        return await patient

    assert asyncio.run(ask()) == (SECRET,)
    assert not asked.acquire(blocking=False)


def test_tls_checks_ca_name_and_client_certificate(one: Server, tmp_path: Path) -> None:
    """`rediss://` trusts only the CA of the URL, checks the host's name, and has a certificate."""
    authority, stranger = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    stranger.cert_pem.write_to_path(str(tmp_path / "stranger.pem"))
    client = authority.issue_cert("loopguard.example")
    client.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "client.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.verify_mode = ssl.CERT_REQUIRED
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)
    cases = {
        "good": ("127.0.0.1", f"ssl_ca_certs={tmp_path}/ca.pem&ssl_certfile={tmp_path}/client.pem"),
        "unknown CA": (
            "127.0.0.1",
            f"ssl_ca_certs={tmp_path}/stranger.pem&ssl_certfile={tmp_path}/client.pem",
        ),
        "wrong name": (
            "localhost",
            f"ssl_ca_certs={tmp_path}/ca.pem&ssl_certfile={tmp_path}/client.pem",
        ),
        "no certificate": ("127.0.0.1", f"ssl_ca_certs={tmp_path}/ca.pem"),
    }
    found = {}
    with relay(one, tls=context) as address:
        for name, (host, options) in cases.items():
            with Driver(f"rediss://{host}:{address.partition(':')[2]}?{options}") as driver:
                found[name] = driver.store.health()
                assert (driver.refuse() is None) is (name == "good")

    assert found.pop("good") == "ok"
    assert {
        name: text.startswith("unavailable: ") for name, text in found.items()
    } == dict.fromkeys(found, True)
    assert "certificate verify failed" in found["unknown CA"]


# --- the wire


def test_replies_may_arrive_in_any_pieces(one: Server) -> None:
    with relay(one, pieces=1) as address, Driver(f"redis://{address}/2") as driver:
        assert [
            driver.count([make_hit(kind, key=kind) for kind in WINDOW_TYPES])[0].count
            for _ in range(2)
        ] == [1, 2]


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ("ERR Protocol error: unauthenticated bulk length", "auth"),
        ("NOAUTH Authentication required.", "auth"),
        ("WRONGPASS invalid username-password pair or user is disabled.", "auth"),
        ("NOPERM this user has no permissions to run the 'evalsha' command", "auth"),
        (
            "OOM command not allowed when used memory > 'maxmemory'. script: x, on @user_script:1.",
            "oom",
        ),
        (
            "ERR Error running script (call to f_x): @user_script:5: -OOM command not allowed.",
            "oom",
        ),
        ("READONLY You can't write against a read only replica.", "read_only"),
        (
            "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
            "read_only",
        ),
        ("LOADING Redis is loading the dataset in memory", "loading"),
        ("BUSY Redis is busy running a script.", "busy"),
        ("CLUSTERDOWN The cluster is down", "cluster"),
        ("MOVED 1234 127.0.0.1:1", "cluster"),
        ("ERR max number of clients reached", "response"),
        ("ERR whatever", "response"),
    ],
)
def test_error_replies_are_classified(reply: str, kind: str) -> None:
    """The first word tells, also where Redis 6 quotes it inside a script error."""
    with impostor(f"-{reply}\r\n".encode()) as address, Driver(f"redis://{address}") as driver:
        assert driver.metric("store_errors_total", kind=kind) >= 1
        assert driver.store.health().startswith("unavailable: ")


RIGHT = b"*5\r\n:1\r\n:0\r\n:0\r\n:0\r\n:0\r\n"
RUBBISH = {
    "another protocol": b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n",
    "TLS": b"\x15\x03\x01\x00\x02\x02\x46",
    "zeros": bytes(1_000),
    "a status": b"+OK\r\n",
    "an integer": b":1\r\n",
    "a huge integer": b":" + b"9" * 10_000 + b"\r\n",
    "nil": b"$-1\r\n",
    "text": b"$5\r\nhello\r\n",
    "an empty list": b"*0\r\n",
    "too few values": b"*4\r\n" + b":1\r\n" * 4,
    "too many values": b"*10\r\n" + b":1\r\n" * 10,
    "values of another type": b"*5\r\n" + b"$1\r\n1\r\n" * 5,
    "values of several types": b"*5\r\n:1\r\n:0\r\n:0\r\n:0\r\n$-1\r\n",
    "errors for values": b"*5\r\n" + b"-ERR x\r\n" * 5,
    "lists for values": b"*5\r\n" + b"*0\r\n" * 5,
    "negative values": b"*5\r\n:-1\r\n:0\r\n:0\r\n:0\r\n:0\r\n",
    "two answers": RIGHT * 2,
    "a huge list": b"*1000000000\r\n",
    "a huge list after an answer": RIGHT + b"*1000000000\r\n",
    "huge lists in lists": b"*400000\r\n" * 100_000,
    "deep lists": b"*1\r\n" * 100_000,
    "a list of less than nothing": b"*-7\r\n",
    "a huge map": b"%500000000\r\n",
    "a huge push": b">500000000\r\n",
    "pushes": b">1\r\n+x\r\n" * 100_000,
    "an empty push": b">0\r\n",
    "moved to nowhere": b"-MOVED\r\n",
    "moved to an odd place": b"-MOVED 1 2 3\r\n",
    "an error without an end": b"-" + b"x" * 10_000_000,
    "a text without an end": b"$10000000\r\n" + b"x" * 10_000_000,
    "a text of less than nothing": b"$-7\r\n",
}
"""What a server may answer that is no answer."""


@pytest.mark.parametrize("rubbish", RUBBISH)
@pytest.mark.parametrize(
    "form",
    ["redis://{}", f"redis://{{}}?{LIBRARY}", "redis+sentinel://{}/counts", "redis+cluster://{}"],
)
def test_store_with_invalid_replies_is_unavailable(
    form: str, rubbish: str, caplog: pytest.LogCaptureFixture
) -> None:
    with impostor(RUBBISH[rubbish]) as address, Driver(form.format(address)) as driver:
        health = driver.store.health()
        error = driver.refuse()

        assert health.startswith("unavailable: ")
        assert len(health) < 1_000
        assert not driver.metric("store_errors_total", kind="timeout")
        assert not driver.metric("store_errors_total", kind="internal")
        assert error is not None
    assert [record.message for record in caplog.records] == [
        "store unavailable, each replica counts separately"
    ]
    assert [record.exc_info for record in caplog.records] == [None]


@pytest.mark.parametrize(
    "greeting",
    [b"SSH-2.0-OpenSSH_9.6\r\n", b"+OK POP3 ready\r\n", b"220 mail ESMTP\r\n", b"-ERR go away\r\n"],
)
def test_server_that_speaks_first_is_rejected(greeting: bytes) -> None:
    with impostor(RIGHT, greeting) as address, Driver(f"redis://{address}") as driver:
        assert driver.store.health().startswith("unavailable: ")


@pytest.mark.parametrize(
    ("start", "rest"),
    [
        (b"$9999999999\r\n", b"x"),
        (b"-", b"x"),
        (b":", b"1"),
        (b"*400000\r\n", b"*1\r\n"),
        (b"", b"*1\r\n"),
        (b"", b":1\r\n"),
    ],
)
def test_endless_reply_is_cut_off(start: bytes, rest: bytes) -> None:
    sent = []

    def serve(client: socket.socket) -> None:
        client.recv(65_536)
        client.sendall(start)
        for number in range(10_000):
            sent.append(number * 50_000)
            client.sendall(rest * (50_000 // len(rest)))

    with listening(serve) as address, Driver(f"redis://{address}") as driver:
        assert driver.metric("store_errors_total", kind="response") >= 1
        assert driver.store.health().startswith(f"unavailable: {address}: ")
    assert 0 < max(sent) < 30_000_000


def ask_ring(driver: Driver) -> object:
    return driver.push([make_push("a", key="odd")])


def ask_session(driver: Driver) -> object:
    return driver.account([make_step(1, NO_LIMITS, key="odd:7f")])


MALFORMED: dict[str, tuple[Callable[[Driver], object], bytes]] = {
    "a byte for a ring": (ask_ring, b"1"),
    "requests of a ring alone": (ask_ring, b"12345678"),
    "half an entry of a ring": (ask_ring, b"12345678\x05abc"),
    "too long entries of a ring": (ask_ring, b"12345678\x00" + b"12345678\xff" * 3),
    "an empty standing": (ask_session, b""),
    "a standing that is too short": (ask_session, bytes(76)),
    "a standing with no limit of ours": (ask_session, b"\x07" + bytes(76)),
    "a standing with no killer of ours": (ask_session, b"\x00\x03" + bytes(75)),
    "a standing without its tool": (ask_session, bytes(76) + b"\x01"),
    "a standing without a tool's name": (ask_session, bytes(76) + b"\x01" + bytes(8)),
    "a standing with half a tool": (ask_session, bytes(76) + b"\x01" + bytes(7)),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_value_is_rejected(one: Server, case: str) -> None:
    ask, value = MALFORMED[case]
    reply = b"*1\r\n$%d\r\n%s\r\n" % (len(value), value)
    with (
        altered(one, lambda asked, answer: reply if b":odd:" in asked else answer) as address,
        Driver(f"redis://{address}") as driver,
    ):
        assert driver.store.health() == "ok"
        with pytest.raises(StoreError):
            ask(driver)
        assert driver.metric("store_errors_total", kind="response") == 1


@pytest.mark.parametrize("rubbish", [b":1\r\n", b"*1\r\n:1\r\n", b"*2\r\n$1\r\n1\r\n$-1\r\n"])
def test_malformed_list_of_orders_is_rejected(one: Server, rubbish: bytes) -> None:
    with (
        altered(one, lambda asked, answer: rubbish if b":odd:" in asked else answer) as address,
        Driver(f"redis://{address}") as driver,
    ):
        with pytest.raises(StoreError, match="not answer with a list of overrides") as error:
            driver.read(ORDERS, driver.name("odd"))

        assert (error.value.kind, driver.store.health()) == ("response", "ok")


def test_store_is_used_again_after_valid_replies(one: Server) -> None:
    sane = Event()
    with (
        altered(one, lambda _, answer: answer if sane.is_set() else b"*1000000000\r\n") as address,
        Driver(f"redis://{address}") as driver,
    ):
        assert driver.refuse()
        sane.set()

        eventually(driver.well, "the recovery")
        assert driver.count([make_hit()])[0].count == 1


def test_old_server_gets_only_the_password(one: Server) -> None:
    """Before Redis 6 AUTH took one word, and said so."""
    told: list[list[bytes]] = []

    def alter(asked: bytes, answer: bytes) -> bytes:
        if b"AUTH" not in asked:
            return answer
        told.append(asked.split(b"\r\n")[2::2])
        return (
            b"+OK\r\n"
            if len(told[-1]) == 2
            else b"-ERR wrong number of arguments for 'auth' command\r\n"
        )

    with altered(one, alter) as address, Driver(f"redis://ann:{SECRET}@{address}") as driver:
        assert driver.count([make_hit()])[0].count == 1
    assert told == [[b"AUTH", b"ann", SECRET.encode()], [b"AUTH", SECRET.encode()]]


@given(
    start=st.text(max_size=5),
    keys=st.lists(st.text(max_size=20)),
    argument=st.integers() | st.binary() | st.text(),
)
def test_commands_are_packed_as_by_hiredis(
    start: str, keys: list[str], argument: str | int | bytes
) -> None:
    words = (argument, *(start + key for key in keys))

    written = b"*%d\r\n" % len(words) + write_word(argument) + write_keys(start, keys)

    # Its stub takes one-tuples alone
    assert written == hiredis.pack_command(words)  # type: ignore[arg-type]


# --- scripts and keys


def test_scripts_are_sent_again_after_a_flush(either: Driver, one: Server) -> None:
    hits = [make_hit(kind, key=kind) for kind in WINDOW_TYPES]
    either.count(hits, 0)
    either.push([make_push("a")], 0)
    either.account([make_step(1, NO_LIMITS)], 0)
    one.client().script_flush()

    assert [answer.count for answer in either.count(hits, 1)] == [2, 2, 2]
    assert either.push([make_push("b")], 1) == [[b"a", b"b"]]
    assert [standing.steps for standing in either.account([make_step(2, NO_LIMITS)], 1)] == [2]
    assert either.store.health() == "ok"


@pytest.mark.parametrize("window_type", WINDOW_TYPES)
@pytest.mark.parametrize("cooldown_ms", [0, 90_000])
def test_counters_expire(driver: Driver, one: Server, window_type: str, cooldown_ms: int) -> None:
    hit = make_hit(window_type, cooldown_ms=cooldown_ms, threshold=2)
    lives = []
    for _ in range(2):
        driver.count([hit])
        lives.append(one.client().pttl(f"loopguard:{driver.key(hit)}"))

    assert 0 < lives[0] <= hit.window_ms + 1_000
    assert (
        max(hit.window_ms, cooldown_ms) - 10_000
        < lives[1]
        <= max(hit.window_ms, cooldown_ms) + 1_000
    )


def test_all_other_keys_expire(driver: Driver, one: Server) -> None:
    driver.push([make_push("a")])
    driver.account([make_step(1, NO_LIMITS)])
    for kind in KINDS:
        driver.put(kind, driver.name("subject"), "a", b"x", 60)
        driver.put(kind, driver.name("subject"), "b", b"x", 30)

    lives = sorted(one.client().pttl(key) for key in one.client().scan_iter(f"*{driver.name('')}*"))

    assert 10_000 < lives[0] <= 11_000
    assert len(lives) == 1 + 2 + 3 * len(KINDS)
    assert all(55_000 < life <= 61_000 for life in lives[1:])


_AGENT, _PARENT = "a" * 16, "b" * 16


@pytest.mark.parametrize(
    "poison",
    [
        "set x y",
        "set x \x01root",
        "set x ''",
        f"set x {'y' * 17}",
        f"set x {'y' * 70}",
        "hset x a b",
        "rpush x y",
        "rpush x 1 y",
        "sadd x y",
    ],
)
def test_keys_of_other_programs_are_replaced(driver: Driver, one: Server, poison: str) -> None:
    hits = [make_hit(kind, key=kind) for kind in WINDOW_TYPES]
    good_hits = [replace(hit, key=f"good-{hit.key}") for hit in hits]
    ring, good_ring = make_push("a", key="bad"), make_push("a", key="good")
    session = ask_in_tree(1, 1, AgentLimits(), key="bad:7f", caller="bad caller:7f")
    good_session = make_step(1, NO_LIMITS, key="good:7f", caller="others:7f")
    driver.count(good_hits, 1_000_000)
    driver.push([good_ring])
    driver.account([good_session])
    placed = cast("Step", driver.place(session))
    command, _, *values = poison.split(" ")
    keys = [*map(driver.key, hits), driver.key(ring), placed.key, placed.caller]
    names = ["tree:p::s1:7f", f"root:{_AGENT}:7f", f"root:{_PARENT}:7f"]
    for key in [*keys, *map(driver.name, names)]:
        one.client().execute_command(command, f"loopguard:{key}", *values)

    first, second = [
        [answer.count for answer in driver.count([*good_hits, *hits], now)]
        for now in (1_000_001, 1_000_002)
    ]
    entries = driver.push([good_ring._replace(request=b"another."), ring])
    again = [replace(one, identity=b"another.") for one in (good_session, session)]
    standings = driver.account([session, *again])

    assert first[:3] == [2, 2, 2]
    assert all(count <= 3 for count in first[3:])
    assert (second, entries) == ([count + 1 for count in first], [[b"a", b"a"], [b"a"]])
    assert [(standing.steps, standing.tree) for standing in standings] == [
        (1, (1, 0, 1, True)),
        (2, None),
        (2, (1, 0, 1, False)),
    ]
    assert (driver.find_root(_AGENT, _PARENT).hex(), driver.store.health()) == (_PARENT, "ok")


def test_truncated_tree_counts_as_missing(driver: Driver, one: Server) -> None:
    key = f"loopguard:{driver.name('tree:p::s1:7f')}"
    first = driver.account([ask_in_tree(1, 1, AgentLimits())], 1)[0]
    one.client().set(key, one.client().get(key)[:-13])

    again = driver.account([ask_in_tree(2, 1, AgentLimits())], 2)[0]

    assert first.tree == again.tree == (1, 0, 1, True)


@pytest.mark.parametrize("poison", ["set x y", "set x ''", "hset x a b", "rpush x y", "sadd x y"])
@pytest.mark.parametrize("part", ["ends", "documents", "version"])
@pytest.mark.parametrize("kind", KINDS)
def test_document_keys_of_other_programs_are_replaced(
    driver: Driver, one: Server, kind: str, part: str, poison: str
) -> None:
    subject = driver.name("subject")
    command, _, *values = poison.split(" ")
    one.client().execute_command(command, f"loopguard:{kind}:{subject}:{part}", *values)

    before = driver.read(kind, subject)
    driver.put(kind, subject, "a", b"x", 60)

    assert (before, driver.read(kind, subject)) == ({}, {"a": b"x"})


@pytest.mark.parametrize("kind", KINDS)
def test_missing_document_leaves_the_others(driver: Driver, one: Server, kind: str) -> None:
    subject = driver.name("subject")
    key = f"loopguard:{kind}:{subject}:documents"
    for name in "abc":
        driver.put(kind, subject, name, b"x", 60)
    one.client().hdel(key, "a")
    if kind == BOARDS:
        assert one.client().hget(key, "b") == b"\x01x"
        one.client().hset(key, "b", b"\x02x")

    assert driver.read(kind, subject) == ({"c": b"x"} if kind == BOARDS else {"b": b"x", "c": b"x"})


@pytest.mark.parametrize("count", [2**32 - 2, 2**32 - 1])
def test_tally_counts_up_to_four_bytes(driver: Driver, one: Server, count: int) -> None:
    now = 1_700_000_000_000
    driver.count([LONG], now)
    one.client().setrange(f"loopguard:{driver.key(LONG)}", 1, count.to_bytes(4))

    counts = [answer.count for _ in range(2) for answer in driver.count([LONG], now + 1)]

    assert counts == [count + 1, min(count + 2, 2**32)]


YARDSTICK = """
for number = 1, 1000 do
  redis.call('SET', KEYS[1],
    string.format('%.0f', (tonumber(redis.call("GET", KEYS[1]) or 0)) + number))
end
"""


def ask_old_log(driver: Driver, one: Server, number: int) -> Callable[[], object]:
    """A request after 10,000 that are too old, all of them or all but ten."""
    hit = make_hit("sliding_log", threshold=10_000, count_to=10_000)
    one.client().rpush(f"loopguard:{driver.key(hit)}", 0, *[at // 10 for at in range(10_000)])
    return lambda: driver.count([hit], 11_000 - number % 2)


def ask_half_old_logs(driver: Driver, one: Server, _: int) -> Callable[[], object]:
    """Requests of many keys, each with 1,000 remembered times, half of which are too old."""
    hits = [
        make_hit("sliding_log", key=str(place), threshold=1_000, count_to=1_000)
        for place in range(MAX_BATCH)
    ]
    for hit in hits:
        one.client().rpush(f"loopguard:{driver.key(hit)}", 0, *range(1_000))
    return lambda: driver.count(hits, 10_500)


def ask_many(driver: Driver, _: Server, number: int) -> Callable[[], object]:
    hits = [make_hit(WINDOW_TYPES[number % 3], key=str(place)) for place in range(MAX_BATCH)]
    return lambda: driver.count(hits)


def ask_long_histories(driver: Driver, _: Server, number: int) -> Callable[[], object]:
    """Steps with as many calls as are examined, and as many tools; without ids if number is odd."""
    tools = tuple((tool.to_bytes(4), 10_000) for tool in range(1, 61))
    limits = limit(tool_calls=10_000, tools=tools, window=500, threshold=400)
    history = [make_record(place * 8, arguments=str(place)) for place in range(1_000)]
    history = [bytes(6) + record[6:] for record in history] if number % 2 else history
    steps = [
        make_step(place, limits, history[place * 10 : 512 + place * 10]) for place in range(20)
    ]
    return lambda: driver.account(steps)


def ask_large_tree(driver: Driver, _: Server, number: int) -> Callable[[], object]:
    limits = AgentLimits(depth=9, agents=2_000, concurrent=1_000, spawns=1_000)
    steps = [ask_in_tree(place, place, limits, place // 2) for place in range(1, 1_025)]
    driver.account(steps[: 1_000 + number], 1)
    return lambda: driver.account(steps[1_000 + number :], 1)


def ask_conversations(driver: Driver, _: Server, __: int) -> Callable[[], object]:
    shown = tuple(map(str, range(40)))
    links = [
        place_link(driver, make_link(Sent(str(place), shown, "z" * 64)))
        for place in range(MAX_BATCH)
    ]
    return lambda: driver.settled(lambda store: store.push(links))


def ask_budgets(driver: Driver, _: Server, __: int) -> Callable[[], object]:
    takes = [replace(make_breaker(), key=driver.name(f"{place}:7f")) for place in range(MAX_BATCH)]

    async def ask() -> None:
        await asyncio.gather(*[cast("Any", driver.store.hit([take])) for take in takes])

    return lambda: driver.run(ask())


@pytest.mark.parametrize(
    "prepare",
    [
        ask_old_log,
        ask_half_old_logs,
        ask_many,
        ask_long_histories,
        ask_large_tree,
        ask_conversations,
        ask_budgets,
    ],
)
def test_no_script_holds_the_server(
    driver: Driver, one: Server, prepare: Callable[[Driver, Server, int], Callable[[], object]]
) -> None:
    """Each takes less than a thousand reads and writes, which are about a millisecond."""
    used = Path(f"/proc/{one.pid}/task/{one.pid}/schedstat")

    def measure(ask: Callable[[], object]) -> float:
        before, scripts = int(used.read_text().split()[0]), one.commands().get("evalsha", 0)
        ask()
        spent = int(used.read_text().split()[0]) - before
        return spent / max(1, one.commands().get("evalsha", 0) - scripts)

    held, yardstick = [], []
    for number in range(4):
        held.append(measure(prepare(driver.fresh(), one, number)))
        yardstick.append(measure(lambda: one.client().eval(YARDSTICK, 1, driver.name("yardstick"))))

    assert max(min(held[::2]), min(held[1::2])) < min(yardstick)


@pytest.mark.parametrize(("calls", "scripts"), [(0, 7), (40, 50), (512, 100)])
def test_steps_are_split_into_short_scripts(
    driver: Driver, one: Server, calls: int, scripts: int
) -> None:
    history = [make_record(number * 8, arguments=str(number)) for number in range(calls)]
    steps = [
        make_step(number, limit(steps=25), history, key=f"session {number % 4}:7f")
        for number in range(100)
    ]
    before = one.commands().get("evalsha", 0) + one.commands().get("eval", 0)

    found = driver.account(steps)

    # Unknown yet
    assert one.commands().get("evalsha", 0) + one.commands().get("eval", 0) - before in (
        scripts,
        scripts + 1,
    )
    assert [standing.steps for standing in found] == [number // 4 + 1 for number in range(100)]


def test_ledger_on_the_server_is_small(driver: Driver, one: Server) -> None:
    limits = limit(
        tool_calls=10_000, tools=tuple((number.to_bytes(4), 10_000) for number in range(1, 61))
    )
    history = [make_record(number * 8, arguments=str(number)) for number in range(4_900)]
    steps = [make_step(number, limits, history[: 4_500 + 4 * number]) for number in range(101)]

    for step in steps:
        (standing,) = driver.account([step])

    assert standing.tool_calls == 4_900
    assert one.client().strlen(f"loopguard:{driver.place(steps[0]).key}") < 9_600


def test_changed_orders_are_read_again(driver: Driver) -> None:
    book = driver.name("book")
    with driver.replica() as other:
        other.put(ORDERS, book, "a", b"x", 60)
        first = driver.run(driver.store.documents.read(ORDERS, book))
        assert first is not None
        assert driver.run(driver.store.documents.read(ORDERS, book, first.version)) is None
        other.run(other.store.documents.drop(ORDERS, book, "a"))
        second = driver.run(driver.store.documents.read(ORDERS, book, first.version))

    assert second is not None
    assert (first.documents, second.documents) == ({"a": b"x"}, {})


def test_failing_board_is_no_outage() -> None:
    with server() as own, Driver(f"redis://{own.address}") as driver:
        driver.count([make_hit()])
        driver.put(BOARDS, "board", "a", b"x", 60)
        own.client().execute_command("ACL", "SETUSER", "default", "-eval")
        with pytest.raises(StoreError) as error:
            driver.read(BOARDS, "board")
        counted = driver.count([make_hit()])[0].count
        health = driver.store.health()
        own.client().execute_command("ACL", "SETUSER", "default", "+eval")

        assert (error.value.kind, counted, health) == ("auth", 2, "ok")
        assert driver.read(BOARDS, "board") == {"a": b"x"}


SECONDS = st.integers(0, 12).map(lambda number: number * 1_000)
"""Whole seconds: the server forgets expired values a second later, by its own clock."""


@given(
    window_type=st.sampled_from(WINDOW_TYPES),
    threshold=st.integers(1, 4),
    cooldown=st.sampled_from([0, 0, 5_000, 30_000]),
    count_refused=st.booleans(),
    gaps=st.lists(SECONDS, min_size=1, max_size=15),
    times=st.integers(1, 5),
    later=st.integers(0, 40).map(lambda number: number * 1_000),
)
def test_verdict_lasts_as_long_as_stated(
    opened: tuple[Driver, RedisBackend],
    window_type: str,
    threshold: int,
    cooldown: int,
    count_refused: bool,
    gaps: list[int],
    times: int,
    later: int,
) -> None:
    """Requests sent as one count as if sent alone; a hit before the verdict's end is refused."""
    driver, backend = opened
    hit = Hit(
        driver.fresh().key(make_hit()), window_type, 20_000, threshold, cooldown, count_refused, 100
    )
    moments = [1_000 + sum(gaps[: position + 1]) for position in range(len(gaps))]
    history = [*moments[:-1], *[moments[-1]] * times]

    async def counted() -> tuple[Count, int]:
        calls = [
            *(count_call(hit, 1, now) for now in moments[:-1]),
            count_call(hit, times, moments[-1]),
        ]
        verdicts = [(await backend.call([call]))[0] for call in calls]
        return verdicts[-1].answer, verdicts[-1].stands_ms

    answer, stands = driver.run(counted())

    expected = oracle(hit, history)
    if count_refused:
        assert answer == expected[-1]
    else:
        assert answer == next(
            (one for one in expected[len(moments) - 1 :] if one.looping), expected[-1]
        )
    if answer.looping and later < stands:
        then = oracle(hit, [*history, moments[-1] + later])[-1]
        assert then.looping
        assert then.cooldown_ms == max(0, answer.cooldown_ms - later)


def open_backend(one: Server) -> RedisBackend:
    access = make_access("redis", {})
    layout = Layout("one", access, access.make_pool(ServerAddress("127.0.0.1", one.port)))
    return RedisBackend(ShardServers(layout, "one"), "loopguard:")


@pytest.fixture(scope="module")
def opened(one: Server) -> Iterator[tuple[Driver, RedisBackend]]:
    backend = open_backend(one)
    with Driver(f"redis://{one.address}") as made:
        yield made, backend
        backend.drop()


# --- batches


def test_waiting_hits_share_a_round_trip(either: Driver) -> None:
    async def client(number: int) -> None:
        for turn in range(40):
            await either.ask([make_hit(key=f"{number}-{turn}")], None)

    async def all_clients() -> None:
        await asyncio.gather(*(client(number) for number in range(64)))

    either.run(all_clients())

    hits, trips = either.metric("store_batch_size_sum"), either.metric("store_batch_size_count")
    assert hits == 64 * 40
    assert hits / trips >= 8


@pytest.mark.parametrize(("calls", "trips"), [([9, 1], 1), ([1] * 600, 3)])
def test_simultaneous_questions_are_one_bounded_batch(
    driver: Driver, calls: list[int], trips: int
) -> None:
    hits = [
        [make_hit(WINDOW_TYPES[place % 3], key=f"{call}:{place:02x}") for place in range(size)]
        for call, size in enumerate(calls)
    ]

    async def together() -> None:
        asked = [
            driver.store.push([make_push("a", key="trip:00")]),
            *[driver.store.hit(each) for each in hits],
        ]
        await asyncio.gather(*[cast("Any", answer) for answer in asked])

    driver.run(together())

    assert driver.metric("store_batch_size_count") == trips
    assert driver.metric("store_batch_size_sum") == sum(calls) + 1


@pytest.mark.parametrize("window_type", WINDOW_TYPES)
def test_different_hits_keep_their_own_parameters(driver: Driver, window_type: str) -> None:
    shapes: list[dict[str, Any]] = [
        {"threshold": 2},
        {},
        {"threshold": 2, "cooldown_ms": 7_000},
        {"threshold": 2, "window_ms": 1},
    ]
    hits = [make_hit(window_type, key=str(number), **shape) for number, shape in enumerate(shapes)]

    answers = [driver.count(hits, now) for now in (1_000, 1_001)][-1]

    assert [answer.looping for answer in answers] == [True, False, True, False]
    assert [answer.cooldown_ms for answer in answers] == [0, 0, 7_000, 0]


def test_leaving_caller_disturbs_no_other(either: Driver) -> None:
    async def some_leave() -> list[int]:
        tasks = [
            asyncio.create_task(either.ask([make_hit(threshold=100)], None)) for _ in range(10)
        ]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        return [answer[0].count for answer in answers if not isinstance(answer, BaseException)]

    assert either.run(some_leave()) == [2, 4, 6, 8, 10]


def test_listeners_are_called_once_unless_cancelled(driver: Driver) -> None:
    """A failing listener does not stop the others, and one that has left is not called."""
    told: list[object] = []

    async def listen() -> list[object]:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: told.append(type(context["exception"]))
        )
        hit = make_hit(threshold=100)
        pending = [
            cast("Pending", driver.store.hit([replace(hit, key=driver.key(hit))])) for _ in range(4)
        ]
        pending[0].then(lambda: told[len(told)])
        pending[1].then(lambda: told.append("left"))
        pending[1].cancel()
        pending[2].then(lambda: told.append(pending[2].result()[0].count))
        await pending[3]
        return list(told)

    assert driver.run(listen()) == [IndexError, 3]


def test_unusable_answer_fails_only_its_caller(driver: Driver, one: Server) -> None:
    def finish(_: Sequence[object], answers: Sequence[Any]) -> object:
        count: int = answers[0].answer.count
        return 6 // (count - 2)  # the second one cannot be used

    async def ask() -> list[object]:
        shard = Shard("", open_backend(one), Metrics(), PATIENCE, lambda _: None, alone=True)
        call = count_call(replace(LONG, key=driver.key(LONG)))
        waiting = [shard.ask([call], finish) for _ in range(3)]
        found = await asyncio.gather(*waiting, return_exceptions=True)
        await shard.close()
        return found

    first, second, third = driver.run(ask())

    assert (first, third) == (-6, 6)
    assert isinstance(second, StoreError)
    assert second.kind == "internal"


# --- certainty


def loop(driver: Driver, hit: Hit) -> None:
    while not driver.count([hit])[0].looping:
        pass


MINUTE = make_hit(window_ms=60_000)


@pytest.mark.parametrize("window_type", WINDOW_TYPES)
@pytest.mark.parametrize("cooldown_ms", [0, 60_000])
def test_replicas_agree_about_the_count_of_a_loop(
    driver: Driver, window_type: str, cooldown_ms: int
) -> None:
    hit = make_hit(window_type=window_type, window_ms=60_000, cooldown_ms=cooldown_ms)
    with driver.replica() as other:
        replicas = [driver, other, driver, driver, other, other, other, driver, other, driver]

        counts = [replica.count([hit])[0].count for replica in replicas]

    assert counts == list(range(1, 11))


def test_counts_of_a_hammered_loop_never_decrease(driver: Driver) -> None:
    with driver.replica() as one, driver.replica() as other:
        counts = [
            [replica.count([MINUTE])[0].count for replica in (one, other)] for _ in range(1_000)
        ]

    for own in zip(*counts, strict=True):
        assert list(own) == sorted(set(own))
    assert driver.count([MINUTE])[0].count == 2_001


def test_hammered_loop_is_answered_locally(driver: Driver, one: Server) -> None:
    loop(driver, MINUTE)
    before = one.commands()["evalsha"]

    answers = [driver.count([MINUTE])[0] for _ in range(2_000)]

    assert all(answer.looping for answer in answers)
    assert [answer.count for answer in answers] == list(range(4, 2_004))
    # Ten a second, and a machine may be slow
    assert one.commands()["evalsha"] - before < len(answers) / 4
    tally = f"loopguard:{driver.key(MINUTE)}"
    eventually(
        lambda: driver.well() and int.from_bytes(one.client().getrange(tally, 1, 4)) == 2_003,
        "the last report",
    )


def test_closing_reports_owed_refusals(either: Driver) -> None:
    with either.replica() as leaving:
        loop(leaving, MINUTE)
        for _ in range(20):
            leaving.count([MINUTE])

    assert either.count([MINUTE])[0].count == 24


def test_uncounted_refusals_are_answered_locally(driver: Driver, one: Server) -> None:
    hit = make_hit(window_ms=60_000, count_refused=False)
    loop(driver, hit)
    before = one.commands()["evalsha"]

    answers = [driver.count([hit])[0] for _ in range(500)]

    assert {(answer.count, answer.looping) for answer in answers} == {(3, True)}
    assert one.commands()["evalsha"] - before < len(answers) / 2


def test_known_cooldown_applies_to_other_requests(driver: Driver) -> None:
    (looping, _), (other, _) = cooldown_hits([(True, 1), (False, 1)], cooldown_ms=60_000)
    alone = driver.count([other])[0]

    answers = [
        driver.fresh().count([looping])[0],
        *(driver.count([hit])[0] for hit in (looping, other, looping, other)),
    ]

    assert not alone.looping
    assert [answer.looping for answer in answers] == [True] * 5
    assert all(0 < answer.cooldown_ms <= 60_000 for answer in answers)


def test_changed_policy_asks_the_server_again(driver: Driver) -> None:
    loop(driver, MINUTE)

    assert not driver.count([make_hit(window_ms=60_000, threshold=50)])[0].looping


@pytest.mark.parametrize("count_refused", [True, False])
def test_deleted_key_is_soon_forgotten(driver: Driver, one: Server, count_refused: bool) -> None:
    hit = make_hit(window_ms=60_000, count_refused=count_refused, threshold=100)
    loop(driver, hit)
    one.client().flushall()

    eventually(lambda: not driver.count([hit])[0].looping, "a request that goes on")


def test_known_refusals_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_refusals, "MAX_LOOPS", 3)
    known, hits = (
        KnownRefusals(lambda *_: None),
        [make_hit(key=str(number), count_refused=False) for number in range(10)],
    )

    for hit in hits * known_refusals.HAMMERED:
        known.learn(hit, Count(3, True, 0, 0), 60_000, 0)
    last = hits[-1]
    for _ in range(known_refusals.HAMMERED):
        known.learn(last, Count(3, True, 0, 0), 60_000, 0)

    assert len(known) == 3
    assert [known.answer(hit) is not None for hit in (hits[0], last)] == [False, True]


# --- what breaks


def command(*words: str | int) -> Callable[[Server], None]:
    return lambda broken: broken.client().execute_command(*words)


def lock(broken: Server) -> None:
    broken.client().config_set("requirepass", SECRET)
    broken.client(password=SECRET).client_kill_filter(_type="normal", skipme=True)


TROUBLES: dict[str, tuple[Callable[[Server], None], Callable[[Server], None], set[str]]] = {
    "down": (Server.kill, Server.start, {"connection"}),
    "hung": (Server.hang, Server.resume, {"timeout"}),
    "locked": (
        lock,
        lambda broken: broken.client(password=SECRET).config_set("requirepass", ""),
        {"auth", "connection"},
    ),
    "full": (
        command("CONFIG", "SET", "maxmemory", 1),
        command("CONFIG", "SET", "maxmemory", 0),
        {"oom"},
    ),
    "demoted": (
        command("REPLICAOF", "127.0.0.1", 1),
        command("REPLICAOF", "NO", "ONE"),
        {"read_only"},
    ),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_outage_is_logged_once_and_recovers(
    trouble: str, client: str, caplog: pytest.LogCaptureFixture
) -> None:
    harm, cure, kinds = TROUBLES[trouble]
    caplog.set_level(logging.INFO, "loopguard")
    with server() as broken, Driver(f"redis://{broken.address}{client}", store_timeout=1) as driver:
        assert driver.refuse() is None
        harm(broken)

        eventually(lambda: driver.refuse() and "unavailable" in driver.store.health(), "the outage")
        errors = [driver.refuse() for _ in range(20)]
        eventually(
            lambda: (
                driver.well()
                or any(driver.metric("store_errors_total", kind=kind) for kind in kinds)
            )
        )
        health = driver.store.health()
        cure(broken)
        eventually(driver.well, "the recovery")

        assert {error.kind for error in errors if error} == {"unavailable"}
        assert SECRET not in health
        assert driver.refuse() is None
    lines = [record.message for record in caplog.records if record.name == "loopguard"]
    assert lines == ["store unavailable, each replica counts separately", "store available again"]


def test_hung_server_fails_all_waiting_requests(client: str) -> None:
    with server() as hung, Driver(f"redis://{hung.address}{client}", store_timeout=1) as driver:
        driver.count([make_hit()])
        hung.hang()

        async def flood() -> list[Any]:
            return await asyncio.gather(
                *(driver.ask([make_hit()], None) for _ in range(600)), return_exceptions=True
            )

        answers = driver.run(flood())
        hung.resume()

    assert {type(answer) for answer in answers} == {StoreError}


def test_busy_event_loop_is_no_outage(one: Server, client: str) -> None:
    """If this process, not the server, was too slow, the answers that have arrived are used."""
    with Driver(f"redis://{one.address}{client}", store_timeout=0.3) as driver:

        async def stalled() -> int:
            answer = asyncio.ensure_future(driver.ask([make_hit()], None))
            for _ in range(3):
                await asyncio.sleep(0)
            end = perf_counter() + 0.6
            while perf_counter() < end:
                pass
            return (await answer)[0].count

        assert (driver.run(stalled()), driver.store.health()) == (1, "ok")


@pytest.mark.parametrize(
    ("form", "start"),
    [
        ("redis://{}", "unavailable: {}: "),
        ("redis+cluster://{}", "unavailable: no node of the cluster answers: {}: "),
    ],
)
def test_store_starts_without_a_server(
    form: str, start: str, caplog: pytest.LogCaptureFixture
) -> None:
    with server() as gone:
        pass

    with Driver(form.format(gone.address)) as driver:
        assert driver.store.health().startswith(start.format(gone.address))
        assert driver.refuse()

    assert [record.message for record in caplog.records] == [
        "store unavailable, each replica counts separately"
    ]
