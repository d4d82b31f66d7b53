"""The Redis store beyond counting: URLs and secrets, batches, certainty, what breaks and how it heals; on real servers."""

from __future__ import annotations

import ast
import asyncio
import logging
import re
import socket
import ssl
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event, Semaphore
from time import perf_counter
from typing import Any, cast

import hiredis
import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st
from redis.credentials import CredentialProvider

from extproc.errors import PartlyAwayError, StoreError, UsageError
from extproc.metrics import Metrics
from extproc.settings import Settings
from extproc.store import known_refusals, open_store, topology
from extproc.store.backend import RedisBackend
from extproc.store.client import Access
from extproc.store.credentials import ProvidedCredentials
from extproc.store.link import ServerAddress
from extproc.store.pending import Pending
from extproc.store.redis import TAGS
from extproc.store.remote import RemoteStore
from extproc.store.remote_documents import RemoteDocuments
from extproc.store.resp import write_keys, write_word
from extproc.store.rules.documents import BOARDS, KINDS, ORDERS
from extproc.store.rules.session import Question, Step
from extproc.store.rules.windows import Count, Hit
from extproc.store.scripts import count_call, session_call
from extproc.store.side_connections import SideConnections
from extproc.store.topology import SLOTS, ClusterLayout, SingleLayout, SingleServer, find_slot, spread_tags
from tests.support import ROOT
from tests.support.harness import PATIENCE, eventually
from tests.support.ledger import NO_LIMITS, limit, make_record, make_step, settle_step, tell
from tests.support.records import replace
from tests.support.servers import Driver, Server, cluster, impostor, listening, relay, replicated, sentinels, server
from tests.support.windows import WINDOW_TYPES, cooldown_hits, make_hit, make_push, oracle

SECRET = "hunter2"

AWAY_AFTER = 2
"""Seconds until a shard that hangs counts as away; those that answer do so earlier on a busy machine, too."""


@pytest.fixture(scope="module")
def one() -> Iterator[Server]:
    """One server for all tests that leave it as it was."""
    with server() as made:
        yield made


@pytest.fixture(scope="module")
def six() -> Iterator[list[Server]]:
    """A cluster of three primaries and their replicas."""
    with cluster() as nodes:
        yield nodes


@pytest.fixture
def driver(one: Server) -> Iterator[Driver]:
    """A store on the one server."""
    with Driver(f"redis://{one.address}") as made:
        yield made


def remote(driver: Driver) -> RemoteStore:
    """The store as what it is."""
    return cast("RemoteStore", driver.store)


def backend(driver: Driver) -> RedisBackend:
    """The wire behind a store of one server."""
    return remote(driver)._by_part[0]._backend


def test_the_urls_and_the_rights_that_the_docs_name_are_good() -> None:
    """Every store URL of the table opens, and its ACL rule is the one that is tested."""
    page = (ROOT / "docs" / "operations.md").read_text()
    urls = re.findall(r"`((?:redis|unix)[+a-z]*://[0-9/][^`]*)`", page)

    for url in urls:
        open_store(url, Metrics())
    assert len(urls) == 4
    assert f"`{ACL}`" in page


def test_database_and_prefix(one: Server) -> None:
    """Keys go to the database of the URL and start with its prefix, over one connection that says nothing about itself."""
    with Driver(f"redis://{one.address}/3?prefix=mine-") as driver:
        driver.count([make_hit()])

        keys = one.client(db=3).keys()
        clients = [client for client in one.client().client_list() if client["db"] == "3"]
        assert keys
        assert all(key.startswith(b"mine-") for key in keys)
        assert [(client["lib-name"], client["resp"]) for client in clients if client["cmd"] == "evalsha"] == [("", "2")]


def test_the_default_prefix(driver: Driver, one: Server) -> None:
    """Keys start with `loopguard:`, then the counter key as `explain` shows it."""
    driver.count([make_hit()], 0)

    assert one.client().exists(f"loopguard:{driver.key(make_hit())}")


def test_a_unix_socket(one: Server) -> None:
    """`unix:///path?db=N` connects to the server's socket."""
    with Driver(f"unix://{one.socket}?db=2") as driver:
        assert driver.count([make_hit()])[0].count == 1

        assert one.client(db=2).exists(f"loopguard:{driver.key(make_hit())}")


ACL = (
    "~loopguard:* +evalsha +eval +time +get +set +del +pexpire +llen +lindex +lpush +lpop +rpush "
    "+zadd +zcard +zrange +zrangebyscore +zrem +zscore +hset +hdel +hmget"
)
"""What the docs say a user needs."""


def test_an_acl_user_with_the_least_rights(one: Server) -> None:
    """A user who may call the commands that the docs list, on keys with the prefix, is all that it takes."""
    one.client().execute_command("ACL", "SETUSER", "counter", "on", f">{SECRET}", *ACL.split())

    with Driver(f"redis://counter:{SECRET}@{one.address}") as driver:
        hits = [make_hit(kind, key=kind, cooldown_ms=50) for kind in WINDOW_TYPES]
        answers = [driver.count(hits, now) for now in range(5)]
        entries = [driver.push([make_push(name)])[0] for name in "abcd"]

        assert [answer.count for answer in answers[-1]] == [5, 5, 5]
        assert entries[-1] == [b"b", b"c", b"d"]
        assert driver.store.health() == "ok"


def test_a_password_from_the_environment_or_a_file_that_changes(tmp_path: Path) -> None:
    """A password need not stand in the URL; a file is read at every connect, so a changed password needs no restart."""
    file = tmp_path / "password"
    file.write_text(f"{SECRET}\n")
    with server("--requirepass", SECRET) as locked:
        with Driver(f"redis://{locked.address}", store_password=SECRET) as driver:
            assert driver.count([make_hit()])[0].count == 1

        with Driver(f"redis://{locked.address}", store_password_file=str(file)) as driver:
            admin = locked.client(password=SECRET)
            assert driver.count([make_hit()])[0].count == 1
            admin.config_set("requirepass", "changed")
            file.write_text("changed")
            admin.client_kill_filter(_type="normal", skipme=True)

            assert driver.count([make_hit()])[0].count == 2


def test_a_unix_socket_with_a_password_and_a_database(tmp_path: Path) -> None:
    """A socket's path takes a password from a file; a wrong one is told as on TCP, without repeating it."""
    file = tmp_path / "password"
    file.write_text(SECRET)
    with server("--requirepass", SECRET) as locked:
        with Driver(f"unix://{locked.socket}?db=1", store_password_file=str(file)) as driver:
            assert driver.count([make_hit()])[0].count == 1
        with Driver(f"unix://{locked.socket}", store_password=f"not {SECRET}") as driver:
            assert driver.metric("store_errors_total", kind="auth") >= 1
            assert SECRET not in driver.store.health()


def test_a_refused_login_never_shows_what_was_sent() -> None:
    """A server without AUTH quotes the password in its error, and that error is not repeated."""
    with (
        impostor(f"-ERR unknown command 'AUTH', with args beginning with: '{SECRET}'\r\n".encode()) as address,
        Driver(f"redis://:{SECRET}@{address}") as driver,
    ):
        assert driver.metric("store_errors_total", kind="auth") >= 1
        assert SECRET not in driver.store.health()


def test_a_server_without_a_password_is_told_none_of_ours(one: Server) -> None:
    """A password that the server does not want is an error of kind auth whose text does not repeat it."""
    with server("--requirepass", "other") as locked:
        for address in (locked.address, one.address):
            with Driver(f"redis://:{SECRET}@{address}") as driver:
                expected = "unavailable" if address == locked.address else driver.store.health()  # some servers do not mind
                assert driver.store.health().startswith(expected)
                assert SECRET not in driver.store.health()


PROVIDERS = f'''
from redis.credentials import CredentialProvider

class Rotating(CredentialProvider):
    """Each connect takes the next token, as a cloud's providers do."""
    tokens = iter(["first", "second"])
    def get_credentials(self):
        return "counter", next(self.tokens)

class Asynchronous(Rotating):
    async def get_credentials_async(self):
        return self.get_credentials()
    def get_credentials(self):
        return "counter", "first"

class Failing(CredentialProvider):
    async def get_credentials_async(self):
        raise RuntimeError("no token for {SECRET}")

class Odd(Failing):
    async def get_credentials_async(self):
        return "{SECRET}"

def breaks():
    raise KeyError("{SECRET}")

nothing = 3
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with credential providers."""
    (tmp_path / "lg_providers.py").write_text(PROVIDERS)
    (tmp_path / "lg_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    yield "lg_providers"
    sys.modules.pop("lg_providers", None)


@pytest.mark.parametrize("where", ["redis://{0.address}", "unix://{0.socket}"])
def test_a_credential_provider_is_asked_at_every_connect(module: str, where: str) -> None:
    """A provider named in the URL logs in, and again with what it says then after the connection was lost."""
    with server() as locked:
        admin = locked.client()
        admin.execute_command("ACL", "SETUSER", "counter", "on", ">first", *ACL.split())
        with Driver(f"{where.format(locked)}?credential_provider={module}:Rotating") as driver:
            assert driver.count([make_hit(window_ms=600_000)])[0].count == 1
            admin.execute_command("ACL", "SETUSER", "counter", "resetpass", ">second")
            admin.client_kill_filter(_type="normal", skipme=True)
            driver.run(asyncio.sleep(0.5))

            assert driver.count([make_hit(window_ms=600_000)])[0].count == 2


def test_a_credential_provider_s_own_way_to_wait_is_taken(module: str, one: Server) -> None:
    """A provider that has get_credentials_async is asked through it."""
    one.client().execute_command("ACL", "SETUSER", "counter", "on", "resetpass", ">first", *ACL.split())

    with Driver(f"redis://{one.address}?credential_provider={module}:Asynchronous") as driver:
        assert driver.count([make_hit()])[0].count == 1


@pytest.mark.parametrize(
    ("name", "what"), [("Failing", "raised RuntimeError"), ("Odd", "must return (PASSWORD,) or (USER, PASSWORD)")]
)
@pytest.mark.parametrize("where", ["redis://{0.address}", "unix://{0.socket}"])
def test_a_credential_provider_that_fails_is_a_failed_login(
    module: str, where: str, name: str, what: str, one: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a provider raises or returns is an error of kind auth that repeats none of it."""
    with Driver(f"{where.format(one)}?credential_provider={module}:{name}") as driver:
        assert driver.metric("store_errors_total", kind="auth") >= 1
        assert driver.store.health() == f"unavailable: credential provider {module}:{name} {what}"
    assert SECRET not in caplog.text


FORM = "it takes MODULE:FACTORY, a function without arguments that returns a redis.CredentialProvider"


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
def test_a_credential_provider_that_cannot_be_used_says_what_would_be_right(module: str, name: str, why: str) -> None:
    """A wrong name or factory is a usage error at the start that says what was tried."""
    assert module

    with pytest.raises(UsageError) as error:
        open_store(f"redis://a?credential_provider={name}", Metrics())

    assert str(error.value) == f"credential_provider {name}: {why}; {FORM}"


@pytest.mark.parametrize("settings", [Settings(store_password=SECRET), Settings(store_password_file=__file__)])
def test_a_credential_provider_takes_the_place_of_a_password(module: str, settings: Settings) -> None:
    """A password beside a provider would be forgotten silently, so it is a usage error."""
    with pytest.raises(UsageError, match="replaces user and password; give one or the other"):
        open_store(f"redis://a?credential_provider={module}:Rotating", Metrics(), settings)


def test_a_credential_provider_that_blocks_delays_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider without an asynchronous way is asked in a thread, and not again before it has answered."""
    asked, go_on = Semaphore(0), Event()

    class Blocking(CredentialProvider):
        def get_credentials(self) -> tuple[str]:
            asked.release()
            assert go_on.wait(PATIENCE)
            return (SECRET,)

    monkeypatch.setattr(sys.modules[__name__], "Blocking", Blocking, raising=False)

    async def ask() -> object:
        provider = ProvidedCredentials(f"{__name__}:Blocking")
        given_up, patient = (asyncio.create_task(provider.get_credentials_async()) for _ in range(2))
        await asyncio.to_thread(asked.acquire)
        given_up.cancel()
        go_on.set()
        return await patient

    assert asyncio.run(ask()) == (SECRET,)
    assert not asked.acquire(blocking=False)


def test_tls_with_a_ca_and_a_client_certificate(one: Server, tmp_path: Path) -> None:
    """`rediss://` trusts the CA of the URL alone, checks the host's name, and shows its own certificate."""
    authority, stranger = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    stranger.cert_pem.write_to_path(str(tmp_path / "stranger.pem"))
    client = authority.issue_cert("loopguard.example")
    client.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "client.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.verify_mode = ssl.CERT_REQUIRED
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)

    async def states() -> dict[str, str]:
        found = {}
        with relay(one, tls=context) as address:
            port = address.partition(":")[2]
            for name, host, options in (
                ("good", "127.0.0.1", f"ca={tmp_path}/ca.pem&cert={tmp_path}/client.pem"),
                ("unknown CA", "127.0.0.1", f"ca={tmp_path}/stranger.pem&cert={tmp_path}/client.pem"),
                ("wrong name", "localhost", f"ca={tmp_path}/ca.pem&cert={tmp_path}/client.pem"),
                ("no certificate", "127.0.0.1", f"ca={tmp_path}/ca.pem"),
            ):
                store = open_store(f"rediss://{host}:{port}?{options}", Metrics(), Settings())
                await store.start()
                found[name] = store.health()
                if name == "good":
                    answer = await cast("Any", store.hit([make_hit(key="tls:00")]))
                    assert answer[0].count == 1
                await store.close()
        return found

    found = asyncio.run(states())

    assert found.pop("good") == "ok"
    assert {name: text.startswith("unavailable: ") for name, text in found.items()} == dict.fromkeys(found, True)
    assert "certificate verify failed" in found["unknown CA"]


# --- the wire


def test_replies_in_any_pieces(one: Server) -> None:
    """A server whose answers come byte by byte is understood."""
    with relay(one, pieces=1) as address, Driver(f"redis://{address}/2") as driver:
        assert [driver.count([make_hit(kind, key=kind) for kind in WINDOW_TYPES])[0].count for _ in range(2)] == [1, 2]


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ("ERR Protocol error: unauthenticated bulk length", "auth"),
        ("NOAUTH Authentication required.", "auth"),
        ("WRONGPASS invalid username-password pair or user is disabled.", "auth"),
        ("NOPERM this user has no permissions to run the 'evalsha' command", "auth"),
        ("OOM command not allowed when used memory > 'maxmemory'. script: x, on @user_script:1.", "oom"),
        (
            "ERR Error running script (call to f_x): @user_script:53: -OOM command not allowed when used memory > 'maxmemory'.",
            "oom",
        ),
        ("READONLY You can't write against a read only replica.", "read_only"),
        ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", "read_only"),
        ("LOADING Redis is loading the dataset in memory", "loading"),
        ("BUSY Redis is busy running a script.", "busy"),
        ("CLUSTERDOWN The cluster is down", "cluster"),
        ("MOVED 1234 127.0.0.1:1", "cluster"),
        ("ERR max number of clients reached", "response"),
        ("ERR whatever", "response"),
    ],
)
def test_what_an_error_reply_means(reply: str, kind: str) -> None:
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
    "form", ["redis://{}", f"redis://:{SECRET}@{{}}/3", "redis+sentinel://{}/counts", "redis+cluster://{}"]
)
def test_a_store_that_answers_rubbish_is_a_failed_store(form: str, rubbish: str, caplog: pytest.LogCaptureFixture) -> None:
    """A nonsense answer of a server is never believed, kept, waited for or logged in more than one line."""
    with impostor(RUBBISH[rubbish]) as address, Driver(form.format(address)) as driver:
        health = driver.store.health()
        error = _refused(driver)

        assert health.startswith("unavailable: ")
        assert len(health) < 1_000
        assert not driver.metric("store_errors_total", kind="timeout")
        assert not driver.metric("store_errors_total", kind="internal")
        assert error is not None
    assert [record.message for record in caplog.records] == ["store unavailable, each replica counts for itself"]
    assert [record.exc_info for record in caplog.records] == [None]


@pytest.mark.parametrize(
    "greeting", [b"SSH-2.0-OpenSSH_9.6\r\n", b"+OK POP3 ready\r\n", b"220 mail ESMTP\r\n", b"-ERR go away\r\n"]
)
def test_a_server_that_speaks_first_is_none_of_ours(greeting: bytes) -> None:
    """The banner of another protocol is no answer, not even where it begins as one."""
    with impostor(RIGHT, greeting) as address, Driver(f"redis://{address}") as driver:
        assert driver.store.health().startswith("unavailable: ")


@pytest.mark.parametrize(
    ("start", "rest"),
    [(b"$9999999999\r\n", b"x"), (b"-", b"x"), (b":", b"1"), (b"*400000\r\n", b"*1\r\n"), (b"", b"*1\r\n"), (b"", b":1\r\n")],
)
def test_an_endless_answer_is_cut_off(start: bytes, rest: bytes) -> None:
    """A server that never stops answering is hung up on after a few megabytes, whatever time it is given."""
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


@pytest.mark.parametrize("records", [b"1", b"12345678", b"12345678\x05abc", b"12345678\x00" + b"12345678\xff" * 3])
def test_a_ring_that_is_none_is_no_answer(one: Server, records: bytes) -> None:
    """What cannot be records is not read as a ring."""

    def serve(client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", one.port)) as behind:
            while data := client.recv(65_536):
                behind.sendall(data)
                answer = behind.recv(65_536)
                client.sendall(b"*1\r\n$%d\r\n%s\r\n" % (len(records), records) if b"digest08" in data else answer)

    with listening(serve) as address, Driver(f"redis://{address}") as driver:
        assert driver.store.health() == "ok"
        with pytest.raises(StoreError):
            driver.push([make_push("a", "digest08")])
        assert driver.metric("store_errors_total", kind="response") == 1


def test_a_store_that_comes_to_its_senses_is_taken_back(one: Server) -> None:
    """Once the same address answers as a server does, the store is well again."""
    sane = Event()

    def serve(client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", one.port)) as behind:
            while data := client.recv(65_536):
                behind.sendall(data)
                answer = behind.recv(65_536)
                client.sendall(answer if sane.is_set() else b"*1000000000\r\n")

    with listening(serve) as address, Driver(f"redis://{address}") as driver:
        assert _refused(driver)
        sane.set()

        eventually(lambda: driver.run(asyncio.sleep(0.02)) or driver.store.health() == "ok", "the recovery")
        assert driver.count([make_hit()])[0].count == 1


def _find_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_redis_py_is_used_for_credential_providers_alone() -> None:
    """Its connections and parsers are not used, so a change to its private names cannot break us."""
    sources = ROOT / "extproc"
    using = [path for path in sources.rglob("*.py") if "redis" in path.read_text(encoding="utf-8")]
    imported = {name for path in using for name in _find_imports(path)}

    assert {name for name in imported if name.partition(".")[0] == "redis"} == {"redis.credentials.CredentialProvider"}


def test_a_server_that_knows_no_users_is_given_the_password_alone(one: Server) -> None:
    """Before Redis 6 AUTH took one word, and said so."""
    told: list[bytes] = []

    def serve(client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", one.port)) as behind:
            while data := client.recv(65_536):
                if b"AUTH" in data:
                    told.append(data)
                    wrong = b"-ERR wrong number of arguments for 'auth' command\r\n"
                    client.sendall(b"+OK\r\n" if data.startswith(b"*2") else wrong)
                    continue
                behind.sendall(data)
                client.sendall(behind.recv(65_536))

    with listening(serve) as address, Driver(f"redis://ann:{SECRET}@{address}") as driver:
        assert driver.store.health() == "ok"
        assert driver.count([make_hit()])[0].count == 1
    assert [data.split(b"\r\n")[2::2] for data in told] == [[b"AUTH", b"ann", SECRET.encode()], [b"AUTH", SECRET.encode()]]


# --- scripts and keys


def test_a_server_that_forgot_the_scripts_is_given_them_again(driver: Driver, one: Server) -> None:
    """After SCRIPT FLUSH the next hits of every window type count on, as do rings and sessions, and no one notices."""
    hits = [make_hit(kind, key=kind) for kind in WINDOW_TYPES]
    driver.count(hits, 0)
    driver.push([make_push("a")], 0)
    driver.account([make_step(1, NO_LIMITS)], 0)
    one.client().script_flush()

    answers = driver.count(hits, 1)
    entries = driver.push([make_push("b")], 1)
    standings = driver.account([make_step(2, NO_LIMITS)], 1)

    assert [standing.steps for standing in standings] == [2]
    assert [answer.count for answer in answers] == [2, 2, 2]
    assert entries == [[b"a", b"b"]]
    assert driver.store.health() == "ok"


@pytest.mark.parametrize("window_type", WINDOW_TYPES)
@pytest.mark.parametrize("cooldown_ms", [0, 90_000])
def test_keys_expire_by_themselves(driver: Driver, one: Server, window_type: str, cooldown_ms: int) -> None:
    """A key lives as long as its window or its cooldown, and a second longer."""
    hit = make_hit(window_type, cooldown_ms=cooldown_ms, threshold=2)
    key = f"loopguard:{driver.key(hit)}"

    driver.count([hit])
    first = one.client().pttl(key)
    driver.count([hit])
    tripped = one.client().pttl(key)

    assert 0 < first <= hit.window_ms + 1_000
    assert max(hit.window_ms, cooldown_ms) - 10_000 < tripped <= max(hit.window_ms, cooldown_ms) + 1_000


def test_rings_expire_by_themselves(driver: Driver, one: Server) -> None:
    """A ring lives as long as its time to live, from its last push on, and a second longer."""
    driver.push([make_push("a")])

    assert 10_000 < one.client().pttl(f"loopguard:{driver.key(make_push('a'))}") <= 11_000


def test_nothing_is_ever_scanned() -> None:
    """What is counted, pushed and accounted for calls the commands that an ACL user needs, and no others."""
    with server() as fresh, Driver(f"redis://{fresh.address}") as driver:
        before = set(fresh.commands())
        for now in range(0, 60_000, 3_000):
            driver.count([make_hit(kind, key=kind, cooldown_ms=5_000) for kind in WINDOW_TYPES], now)
            driver.push([make_push(str(now))], now)
            step = make_step(now, limit(max_sessions=1), key=f"session:{now}:7f")
            driver.account([step, settle_step(step)], now)
            driver.run(driver.store.documents.put(BOARDS, driver.name("board"), "a", b"x", 60, now))
            driver.read(BOARDS, driver.name("board"), now)
            driver.run(driver.store.documents.put(ORDERS, driver.name("book"), str(now), b"x", 5, now))
            driver.run(driver.store.documents.drop(ORDERS, driver.name("book"), str(now - 3_000), now))
            driver.run(driver.store.documents.read(ORDERS, driver.name("book"), "", now))
            driver.run(driver.store.share_secret(driver.name("secret"), bytes(32)))

        assert {f"+{name}" for name in set(fresh.commands()) - before} - {"+info"} <= set(ACL.split())


@pytest.mark.parametrize("poison", ["set x y", "set x ''", "hset x a b", "rpush x y", "rpush x 1 y", "sadd x y"])
def test_a_key_of_another_program_is_replaced(driver: Driver, one: Server, poison: str) -> None:
    """Where a counter's key holds something else, that hit counts from 1, and the others of its batch are not disturbed."""
    hits = [make_hit(kind, key=kind) for kind in WINDOW_TYPES]
    good = [replace(hit, key=f"good-{hit.key}") for hit in hits]
    driver.count(good, 1_000_000)
    command, _, *values = poison.split()
    for hit in hits:
        one.client().execute_command(command, f"loopguard:{driver.key(hit)}", *values)

    first = driver.count([*good, *hits], 1_000_001)
    second = driver.count([*good, *hits], 1_000_002)

    assert [answer.count for answer in first[:3]] == [2, 2, 2]
    assert all(answer.count <= 3 for answer in first[3:])
    assert [answer.count for answer in second] == [answer.count + 1 for answer in first]


@pytest.mark.parametrize("poison", ["set x y", "set x ''", "set x 12345678123456789", "hset x a b", "rpush x y", "sadd x y"])
def test_a_ring_s_key_of_another_program_is_replaced(driver: Driver, one: Server, poison: str) -> None:
    """Where a ring's key holds something else, the ring starts from empty, and the others of its batch are not affected."""
    good, bad = make_push("a", key="good"), make_push("a", key="bad")
    driver.push([good])
    command, _, *values = poison.split()
    one.client().execute_command(command, f"loopguard:{driver.key(bad)}", *values)

    entries = driver.push([good._replace(request=b"another."), bad])

    assert entries == [[b"a", b"a"], [b"a"]]


@pytest.mark.parametrize(
    "poison", ["set x y", "set x ''", f"set x {'y' * 70}", f"set x {'y' * 20}", "hset x a b", "rpush x y", "sadd x y"]
)
@pytest.mark.parametrize("kind", ["key", "tenant"])
def test_a_session_s_key_of_another_program_is_replaced(driver: Driver, one: Server, kind: str, poison: str) -> None:
    """Where a key of a session holds something else, it starts from empty, and the others of its batch are not affected."""
    good = make_step(1, NO_LIMITS, key="good:7f", tenant="others:7f")
    bad = make_step(1, NO_LIMITS)
    driver.account([good])
    command, _, *values = poison.split(" ")
    one.client().execute_command(command, f"loopguard:{getattr(driver.place(bad), kind)}", *values)

    first = driver.account([bad, replace(good, identity=b"another.")])
    second = driver.account([replace(bad, identity=b"another.")])

    assert [standing.steps for standing in (*first, *second)] == [1, 2, 2]
    assert driver.store.health() == "ok"


@pytest.mark.parametrize("count", [2**32 - 2, 2**32 - 1])
def test_a_tally_counts_to_four_bytes(driver: Driver, one: Server, count: int) -> None:
    """And no further."""
    hit, now = make_hit(window_ms=600_000), 1_700_000_000_000
    driver.count([hit], now)
    one.client().setrange(f"loopguard:{driver.key(hit)}", 1, count.to_bytes(4))

    counts = [answer.count for _ in range(2) for answer in driver.count([hit], now + 1)]

    assert counts == [count + 1, min(count + 2, 2**32)]


def test_a_document_on_a_board_begins_with_its_version(driver: Driver, one: Server) -> None:
    """One of another version is left out, and the others are there."""
    board = driver.name("board")
    for replica in "ab":
        driver.run(driver.store.documents.put(BOARDS, board, replica, b"x", 60))
    one.client().hset(f"loopguard:boards:{board}:documents", "b", b"\x02x")

    assert one.client().hget(f"loopguard:boards:{board}:documents", "a") == b"\x01x"
    assert driver.read(BOARDS, board) == {"a": b"x"}


def test_sessions_expire_by_themselves(driver: Driver, one: Server) -> None:
    """A ledger and a tenant's number of sessions live as long as a session may be idle, and a second longer."""
    step = make_step(1, NO_LIMITS)

    driver.account([step])
    placed = cast("Step", driver.place(step))

    for key in (placed.key, placed.tenant):
        assert 60_000 < one.client().pttl(f"loopguard:{key}") <= 61_000


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        bytes(76),
        b"\x07" + bytes(76),
        b"\x00\x03" + bytes(75),
        bytes(76) + b"\x01",
        bytes(76) + b"\x01" + bytes(8),
        bytes(76) + b"\x01" + bytes(7),
    ],
    ids=["nothing", "too short", "no limit", "no killer", "a tool is missing", "a name is missing", "half a tool"],
)
def test_a_standing_that_is_none_is_no_answer(answer: bytes) -> None:
    """What cannot be a session's standing is not read as one."""
    with pytest.raises(StoreError) as error:
        session_call(make_step(1, NO_LIMITS)).script.read([answer], 1)

    assert error.value.kind == "response"


def test_replicas_share_the_steps_of_a_session(driver: Driver, one: Server) -> None:
    """Whichever replicas receive the requests of a session at the same time, only as many as the limit are let through."""
    with Driver(f"redis://{one.address}") as other:
        other._name = driver._name
        steps = [make_step(number, limit(steps=7)) for number in range(10)]

        told = [tell((driver, other)[number % 3 == 0].account([step])[0]) for number, step in enumerate(steps)]

    assert told == ["ok"] * 7 + ["max_steps 7/7"] * 3


@pytest.mark.parametrize(("calls", "scripts"), [(0, 7), (40, 50), (512, 100)])
def test_steps_go_in_scripts_that_are_short(driver: Driver, one: Server, calls: int, scripts: int) -> None:
    """Other clients of the server get their turn between them; each session's steps stay in order."""
    history = [make_record(number * 8, arguments=str(number)) for number in range(calls)]
    steps = [make_step(number, limit(steps=25), history, key=f"session {number % 4}:7f") for number in range(100)]
    before = one.commands().get("evalsha", 0) + one.commands().get("eval", 0)

    found = driver.account(steps)

    assert one.commands().get("evalsha", 0) + one.commands().get("eval", 0) - before in (scripts, scripts + 1)  # unknown yet
    assert [standing.steps for standing in found] == [number // 4 + 1 for number in range(100)]


def test_a_ledger_on_the_server_is_small(driver: Driver, one: Server) -> None:
    """Whatever a session has done, its ledger is never hundreds of kilobytes that each step reads and writes."""
    limits = limit(tool_calls=10_000, tools=tuple((number.to_bytes(4), 10_000) for number in range(1, 61)))
    history = [make_record(number * 8, arguments=str(number)) for number in range(4_900)]
    steps = [make_step(number, limits, history[: 4_500 + number]) for number in range(400)]

    for step in steps:
        (standing,) = driver.account([step])

    assert standing.tool_calls == 4_899
    assert one.client().strlen(f"loopguard:{driver.place(steps[0]).key}") < 9_600


@pytest.mark.parametrize("poison", ["set x y", "set x ''", "hset x a b", "rpush x y", "sadd x y"])
@pytest.mark.parametrize("part", ["ends", "documents", "version"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_key_of_documents_of_another_program_is_replaced(
    driver: Driver, one: Server, kind: str, part: str, poison: str
) -> None:
    """Where one of their keys holds something else, there are no documents, and the next one is taken."""
    subject = driver.name("subject")
    command, _, *values = poison.split(" ")
    one.client().execute_command(command, f"loopguard:{kind}:{subject}:{part}", *values)

    before = driver.read(kind, subject)
    driver.run(driver.store.documents.put(kind, subject, "a", b"x", 60))

    assert before == {}
    assert driver.read(kind, subject) == {"a": b"x"}


@pytest.mark.parametrize("kind", KINDS)
def test_documents_expire_by_themselves(driver: Driver, one: Server, kind: str) -> None:
    """The server forgets them a second after the last of them has ended, whichever came last."""
    subject = driver.name("subject")
    driver.run(driver.store.documents.put(kind, subject, "a", b"x", 60))
    driver.run(driver.store.documents.put(kind, subject, "b", b"x", 30))

    lives = [one.client().pttl(f"loopguard:{kind}:{subject}:{part}") for part in ("ends", "documents", "version")]

    assert [round(life / 10_000) for life in lives] == [6, 6, 6]


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_that_is_gone_leaves_the_others(driver: Driver, one: Server, kind: str) -> None:
    """What the server has evicted is not there any more, and does no harm."""
    subject = driver.name("subject")
    for name in "ab":
        driver.run(driver.store.documents.put(kind, subject, name, b"x", 60))
    one.client().hdel(f"loopguard:{kind}:{subject}:documents", "a")

    assert driver.read(kind, subject) == {"b": b"x"}


@pytest.mark.parametrize("rubbish", [b":1\r\n", b"*1\r\n:1\r\n", b"*2\r\n$1\r\n1\r\n$-1\r\n"])
def test_a_list_of_orders_that_is_none_is_no_answer(rubbish: bytes) -> None:
    """Any reply that is not a list of orders raises a StoreError that says so."""
    with impostor(rubbish) as address:
        host, _, port = address.rpartition(":")
        connections = SideConnections(SingleLayout(address, lambda: SingleServer(ServerAddress(host, int(port)), Access())), "")

        async def ask() -> object:
            try:
                return await RemoteDocuments(connections, lambda _: None).read(ORDERS, "book")
            finally:
                connections.drop()

        with pytest.raises(StoreError, match="not answer with a list of overrides") as error:
            asyncio.run(ask())

        assert error.value.kind == "response"


def test_orders_that_change_are_read_anew(driver: Driver, one: Server) -> None:
    """A replica that reads orders gets every change that another one makes, and nothing if there is no change."""
    book = driver.name("book")
    with Driver(f"redis://{one.address}") as other:

        def read(known: str) -> tuple[str, list[str]]:
            found = driver.run(driver.store.documents.read(ORDERS, book, known))
            return (found.version, sorted(found.documents)) if found is not None else (known, ["no news"])

        first, nothing = read("")
        other.run(other.store.documents.put(ORDERS, book, "a", b"x", 60))
        second, a = read(first)
        third, quiet = read(second)
        other.run(other.store.documents.drop(ORDERS, book, "a"))
        _, none = read(third)

    assert (nothing, a, quiet, none) == (["no news"], ["a"], ["no news"], [])


def test_a_board_that_fails_is_no_outage() -> None:
    """If boards alone fail, asking for one raises an error, requests are still counted, and it recovers by itself."""
    with server() as one, Driver(f"redis://{one.address}") as driver:
        driver.count([make_hit()])
        driver.run(driver.store.documents.put(BOARDS, "board", "a", b"x", 60))
        one.client().execute_command("ACL", "SETUSER", "default", "-eval")
        with pytest.raises(StoreError) as error:
            driver.read(BOARDS, "board")
        counted = driver.count([make_hit()])
        health = driver.store.health()
        one.client().execute_command("ACL", "SETUSER", "default", "+eval")

        assert error.value.kind == "auth"
        assert ([answer.count for answer in counted], health) == ([2], "ok")
        assert driver.read(BOARDS, "board") == {"a": b"x"}


def in_seconds(number: int) -> int:
    """Milliseconds: by its own clock the server forgets what is over for a second, which a busy machine may take."""
    return number * 1_000


@given(
    window_type=st.sampled_from(WINDOW_TYPES),
    threshold=st.integers(2, 4),
    cooldown=st.sampled_from([0, 0, 5, 30]).map(in_seconds),
    count_refused=st.booleans(),
    gaps=st.lists(st.integers(0, 12).map(in_seconds), min_size=1, max_size=15),
    times=st.integers(1, 5),
    later=st.integers(0, 40).map(in_seconds),
)
def test_a_verdict_stands_as_long_as_it_says(
    driver_of_module: Driver,
    window_type: str,
    threshold: int,
    cooldown: int,
    count_refused: bool,
    gaps: list[int],
    times: int,
    later: int,
) -> None:
    """Several requests sent as one count as if sent alone; a hit before the verdict's end is refused and starts no cooldown."""
    driver = driver_of_module.fresh()
    hit = Hit("key", window_type, in_seconds(20), threshold, cooldown, count_refused, 100)
    hit = replace(hit, key=driver.key(hit))
    moments = [1_000 + sum(gaps[: position + 1]) for position in range(len(gaps))]
    history = [*moments[:-1], *[moments[-1]] * times]

    async def counted() -> tuple[Count, int]:
        calls = [*(count_call(hit, 1, now) for now in moments[:-1]), count_call(hit, times, moments[-1])]
        verdicts = [(await backend(driver).call([call]))[0] for call in calls]
        return verdicts[-1].answer, verdicts[-1].stands_ms

    answer, stands = driver.run(counted())

    expected = oracle(hit, history)
    if count_refused:
        assert answer == expected[-1]
    else:
        assert answer == next((one for one in expected[len(moments) - 1 :] if one.looping), expected[-1])
    if answer.looping and later < stands:
        then = oracle(hit, [*history, moments[-1] + later])[-1]
        assert then.looping
        assert then.cooldown_ms == max(0, answer.cooldown_ms - later)


@pytest.fixture(scope="module")
def driver_of_module(one: Server) -> Iterator[Driver]:
    """For property tests, whose examples cannot have a fixture each."""
    with Driver(f"redis://{one.address}") as made:
        yield made


@given(
    count_refused=st.booleans(),
    cooldown=st.sampled_from([0, 5, 30]).map(in_seconds),
    gaps=st.lists(st.integers(1, 12).map(in_seconds), min_size=1, max_size=15),
)
def test_the_log_s_script_trips_at_once_with_a_threshold_of_one(
    driver_of_module: Driver, count_refused: bool, cooldown: int, gaps: list[int]
) -> None:
    """The first request is acted on, as in the other windows; a refusal that does not count leaves the log empty."""
    driver = driver_of_module.fresh()
    hit = Hit("key", "sliding_log", in_seconds(20), 1, cooldown, count_refused, 100)
    times = [1_000 + sum(gaps[: position + 1]) for position in range(len(gaps))]

    answers = [driver.count([hit], now)[0] for now in times]

    assert answers == oracle(hit, times)


# --- batches


def test_hits_that_wait_go_together(driver: Driver) -> None:
    """With 64 requests in flight a round trip carries at least 8 hits on average."""

    async def client(number: int) -> None:
        for turn in range(40):
            await driver.ask([make_hit(key=f"{number}-{turn}")], None)

    async def all_clients() -> None:
        await asyncio.gather(*(client(number) for number in range(64)))

    driver.run(all_clients())

    hits, trips = driver.metric("store_batch_size_sum"), driver.metric("store_batch_size_count")
    assert hits == 64 * 40
    assert hits / trips >= 8


def test_a_request_that_meets_many_policies_is_one_round_trip(driver: Driver) -> None:
    """Hits asked for in the same moment, in one call or in two, make one round trip."""
    hits = [make_hit(kind, key=f"{kind}-{number}") for kind in WINDOW_TYPES for number in range(3)]

    async def both() -> None:
        await asyncio.gather(driver.ask(hits, None), driver.ask([make_hit(key="shadow")], None))

    driver.run(both())

    assert driver.metric("store_batch_size_count") == 1
    assert driver.metric("store_batch_size_sum") == 10


@pytest.mark.parametrize("window_type", WINDOW_TYPES)
def test_hits_that_differ_are_each_judged_by_their_own(driver: Driver, window_type: str) -> None:
    """In one call of a script one key's threshold, window and cooldown are not another's."""
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


def test_equal_pushes_to_several_rings_are_all_made(driver: Driver) -> None:
    """What is the same for every key, and so sent once, is done for every key."""
    first = driver.push([make_push("a", key=name) for name in "xyz"], 1)
    second = driver.push([make_push("b", key=name) for name in "xyz"], 2)

    assert first == [[b"a"]] * 3
    assert second == [[b"a", b"b"]] * 3


@given(start=st.text(max_size=5), keys=st.lists(st.text(max_size=20)), argument=st.integers() | st.binary() | st.text())
def test_a_command_is_written_as_the_client_library_writes_it(start: str, keys: list[str], argument: str | int | bytes) -> None:
    """Keys of any length and in any letters, and arguments of any kind, go out byte for byte as hiredis packs them."""
    words = (argument, *(start + key for key in keys))

    written = b"*%d\r\n" % len(words) + write_word(argument) + write_keys(start, keys)

    assert written == hiredis.pack_command(words)  # type: ignore[arg-type]  # its stub takes one-tuples alone


def test_a_batch_is_bounded(driver: Driver) -> None:
    """More hits than fit into one round trip take several."""

    async def flood() -> None:
        await asyncio.gather(*(driver.ask([make_hit(key=str(number))], None) for number in range(600)))

    driver.run(flood())

    assert driver.metric("store_batch_size_count") == 3
    assert driver.metric("store_batch_size_sum") == 600


def test_a_caller_that_leaves_disturbs_no_other(driver: Driver) -> None:
    """Requests cancelled while they wait are counted, and the others get their answers."""

    async def some_leave() -> list[int]:
        tasks = [asyncio.create_task(_one(driver)) for _ in range(10)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, int)]

    counts = driver.run(some_leave())

    assert counts == [2, 4, 6, 8, 10]


async def _one(driver: Driver) -> int:
    return (await driver.ask([make_hit(threshold=100)], None))[0].count


def test_listeners_are_called_once_unless_they_have_left(driver: Driver) -> None:
    """An answer calls its listeners; one that fails does not stop the others, and one that has left is not called."""
    told: list[object] = []

    async def listen() -> list[object]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(type(context["exception"])))
        pending = [cast("Pending", driver.store.hit([make_hit(threshold=100)])) for _ in range(4)]
        pending[0].then(lambda: told[len(told)])
        pending[1].then(lambda: told.append("left"))
        pending[1].cancel()
        pending[2].then(lambda: told.append(pending[2].result()[0].count))
        await pending[3]
        return list(told)

    assert driver.run(listen()) == [IndexError, 3]


def test_pushes_and_hits_of_one_request_are_one_round_trip(driver: Driver) -> None:
    """What is counted and what is pushed in the same moment goes in one write."""

    async def both() -> None:
        pushed = driver.store.push([make_push("a", key="trip:00")])
        counted = driver.store.hit([make_hit(key="trip:01")])
        await asyncio.gather(cast("Any", pushed), cast("Any", counted))

    driver.run(both())

    assert driver.metric("store_batch_size_count") == 1
    assert driver.metric("store_batch_size_sum") == 2


# --- certainty


def _loop(driver: Driver, hit: Hit) -> None:
    """Count until the loop is refused."""
    while not driver.count([hit])[0].looping:
        pass


@pytest.mark.parametrize("window_type", ["sliding_ttl", "sliding_log", "fixed"])
@pytest.mark.parametrize("cooldown_ms", [0, 60_000])
def test_replicas_agree_about_the_count_of_a_loop(driver: Driver, one: Server, window_type: str, cooldown_ms: int) -> None:
    """Whichever replica a request meets, the count is one more than the last, before and after the loop has tripped."""
    hit = make_hit(window_type=window_type, window_ms=60_000, cooldown_ms=cooldown_ms)
    with Driver(f"redis://{one.address}") as other:
        other._name = driver._name
        replicas = [driver, other, driver, driver, other, other, other, driver, other, driver]

        counts = [replica.count([hit])[0].count for replica in replicas]

    assert counts == list(range(1, 11))


def test_what_a_replica_says_of_a_hammered_loop_never_goes_back(driver: Driver, one: Server) -> None:
    """Two replicas under load at once each count upwards, and no count is lost: a third replica reads all of them."""
    hit = make_hit(window_ms=60_000)
    with Driver(f"redis://{one.address}") as other, Driver(f"redis://{one.address}") as third:
        other._name = third._name = driver._name
        counts = [[replica.count([hit])[0].count for replica in (driver, other)] for _ in range(1_000)]
        for replica in (driver, other):
            known = remote(replica)._known_refusals._known[driver.key(hit)]
            eventually(lambda: replica.run(asyncio.sleep(0.02)) or known.owed == 0)  # noqa: B023  # called before the next
        last = third.count([hit])[0].count

    for own in zip(*counts, strict=True):
        assert list(own) == sorted(set(own))
    assert last == 2_001


def test_an_error_of_ours_is_one_callers_alone(driver: Driver) -> None:
    """An answer that cannot be decoded fails its own caller; the others in the round trip are answered, and none hangs."""

    async def ask() -> list[object]:
        hits = [make_hit(key=driver.key(make_hit(key=name))) for name in ("a", "b", "c")]
        finishes = [_count, lambda calls, answers: answers[len(calls)], _count]
        waiting = [remote(driver)._ask([count_call(hit, 1, None)], finish) for hit, finish in zip(hits, finishes, strict=True)]
        return await asyncio.gather(*waiting, return_exceptions=True)

    first, second, third = driver.run(ask())

    assert (first, third) == (1, 1)
    assert isinstance(second, StoreError)
    assert second.kind == "internal"


def _count(_: Sequence[object], answers: Sequence[Any]) -> int:
    count: int = answers[0].answer.count
    return count


def test_a_hammered_loop_is_no_hot_key(driver: Driver, one: Server) -> None:
    """A loop under refusal is answered locally; the server is updated now and then, and its count is right in the end."""
    hit = make_hit(window_ms=60_000)
    _loop(driver, hit)
    before = one.commands()["evalsha"]

    answers = [driver.count([hit])[0] for _ in range(2_000)]
    calls = one.commands()["evalsha"] - before
    with Driver(f"redis://{one.address}") as other:
        other._name = driver._name
        eventually(lambda: driver.run(asyncio.sleep(0.02)) or remote(driver)._known_refusals._known[driver.key(hit)].owed == 0)
        seen = other.count([hit])[0].count

    assert all(answer.looping for answer in answers)
    assert [answer.count for answer in answers] == list(range(4, 2_004))
    assert calls < len(answers) / 4  # ten a second, and a machine may be slow
    assert seen == 2_004


def test_refusals_that_do_not_count_cost_nothing(driver: Driver, one: Server) -> None:
    """With count_refused off a certain refusal is not sent at all, and shows the same count each time."""
    hit = make_hit(window_ms=60_000, count_refused=False)
    _loop(driver, hit)
    before = one.commands()["evalsha"]

    answers = [driver.count([hit])[0] for _ in range(500)]

    assert {(answer.count, answer.looping) for answer in answers} == {(3, True)}
    assert one.commands()["evalsha"] - before < len(answers) / 2


def test_what_is_known_of_a_loop_is_asked_for_all_others(driver: Driver) -> None:
    """A cooldown that a known loop has tripped holds for a request that is none, with the server's clock and from here."""
    (loop, _), (other, _) = cooldown_hits([(True, 1), (False, 1)], cooldown_ms=60_000)
    alone = driver.count([other])[0]

    answers = [driver.fresh().count([loop])[0], *(driver.count([hit])[0] for hit in (loop, other, loop, other))]

    assert not alone.looping
    assert [answer.looping for answer in answers] == [True] * 5
    assert all(0 < answer.cooldown_ms <= 60_000 for answer in answers)


def test_a_changed_policy_is_asked_about_anew(driver: Driver) -> None:
    """What was certain for one threshold says nothing about another."""
    _loop(driver, make_hit(window_ms=60_000))

    assert not driver.count([make_hit(window_ms=60_000, threshold=50)])[0].looping


@pytest.mark.parametrize("count_refused", [True, False])
def test_a_key_that_an_operator_deletes_is_forgotten_here_as_well(driver: Driver, one: Server, count_refused: bool) -> None:
    """After FLUSHALL a loop that hammers on is soon let through again, and counts from 1."""
    hit = make_hit(window_ms=60_000, count_refused=count_refused, threshold=100)
    _loop(driver, hit)
    one.client().flushall()

    eventually(lambda: not driver.count([hit])[0].looping, "a request that goes on")


def test_known_refusals_are_bounded(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many loops there are, a bounded number is remembered; the others are asked about."""
    monkeypatch.setattr(known_refusals, "MAX_LOOPS", 3)
    for number in range(10):
        _loop(driver, make_hit(window_ms=60_000, key=str(number)))

    assert len(remote(driver)._known_refusals) == 3
    assert driver.count([make_hit(window_ms=60_000, key="0")])[0].count == 4


def test_closing_sends_what_is_owed(driver: Driver, one: Server) -> None:
    """Refusals answered here right before the end are counted on the server."""
    hit = make_hit(window_ms=60_000)
    with Driver(f"redis://{one.address}") as leaving:
        leaving._name = driver._name
        _loop(leaving, hit)
        for _ in range(20):
            leaving.count([hit])

        assert remote(leaving)._known_refusals._known[leaving.key(hit)].owed > 0
    assert driver.count([hit])[0].count == 24


# --- what breaks


def _kill(broken: Server) -> None:
    broken.kill()


def _command(*command: str | int) -> Callable[[Server], None]:
    def run(broken: Server) -> None:
        broken.client().execute_command(*command)

    return run


def _lock(broken: Server) -> None:
    broken.client().config_set("requirepass", SECRET)
    broken.client(password=SECRET).client_kill_filter(_type="normal", skipme=True)


TROUBLES: dict[str, tuple[Callable[[Server], None], Callable[[Server], None], set[str]]] = {
    "down": (_kill, Server.start, {"connection"}),
    "hung": (Server.hang, Server.resume, {"timeout"}),
    "locked": (_lock, lambda broken: broken.client(password=SECRET).config_set("requirepass", ""), {"auth", "connection"}),
    "full": (_command("CONFIG", "SET", "maxmemory", 1), _command("CONFIG", "SET", "maxmemory", 0), {"oom"}),
    "demoted": (_command("REPLICAOF", "127.0.0.1", 1), _command("REPLICAOF", "NO", "ONE"), {"read_only"}),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_is_told_once_and_heals(trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    """Requests fail rather than wait, the cause is in health and metrics, one line each tells of outage and recovery."""
    harm, cure, kinds = TROUBLES[trouble]
    caplog.set_level(logging.INFO, "loopguard")
    with server() as broken, Driver(f"redis://{broken.address}", store_timeout=1) as driver:
        assert driver.count([make_hit(window_ms=600_000)])[0].count == 1
        harm(broken)

        eventually(lambda: _refused(driver) and "unavailable" in driver.store.health(), "the outage")
        errors = [_refused(driver) for _ in range(20)]
        eventually(
            lambda: driver.run(asyncio.sleep(0.02)) or any(driver.metric("store_errors_total", kind=kind) for kind in kinds)
        )
        health = driver.store.health()
        cure(broken)
        eventually(lambda: driver.run(asyncio.sleep(0.02)) or driver.store.health() == "ok", "the recovery")

        assert {error.kind for error in errors if error} == {"unavailable"}
        assert SECRET not in health
        assert driver.count([make_hit(window_ms=600_000)])[0].count >= 1
    lines = [record.message for record in caplog.records if record.name == "loopguard"]
    assert lines == ["store unavailable, each replica counts for itself", "store available again"]


def _refused(driver: Driver) -> StoreError | None:
    try:
        driver.count([make_hit(window_ms=600_000)])
    except StoreError as error:
        return error
    return None


def test_a_hung_server_fails_all_waiting_requests() -> None:
    """Concurrent requests, in flight and in the queue, all get an error if the server does not answer."""
    with server() as hung, Driver(f"redis://{hung.address}", store_timeout=1) as driver:
        driver.count([make_hit()])
        hung.hang()

        async def flood() -> list[Any]:
            return await asyncio.gather(*(driver.ask([make_hit()], None) for _ in range(600)), return_exceptions=True)

        answers = driver.run(flood())
        hung.resume()

    assert {type(answer) for answer in answers} == {StoreError}


def test_a_busy_event_loop_is_no_outage(driver: Driver) -> None:
    """If this process, not the server, was too slow, the answers that have arrived are used."""
    store = remote(driver)
    store._by_part[0]._timeout = 0.3

    async def stalled() -> int:
        answer = asyncio.ensure_future(cast("Any", store.hit([make_hit(key="stall:00")])))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        _spin(0.6)
        return cast("int", (await answer)[0].count)

    assert driver.run(stalled()) == 1
    assert driver.store.health() == "ok"


def _spin(seconds: float) -> None:
    """Hold the event loop."""
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


def test_a_connection_that_the_server_closed_is_opened_again(driver: Driver, one: Server) -> None:
    """An idle connection's end costs the next request nothing but a connect."""
    driver.count([make_hit()])
    one.client().client_kill_filter(_type="normal", skipme=True)
    driver.run(asyncio.sleep(0.5))

    assert driver.count([make_hit()])[0].count == 2


def test_a_store_without_a_server_starts(caplog: pytest.LogCaptureFixture) -> None:
    """Starting without a server is no error: it is told, and the first request fails at once."""
    with server() as gone:
        pass

    with Driver(f"redis://{gone.address}") as driver:
        assert driver.store.health().startswith("unavailable: 127.0.0.1:")
        assert _refused(driver)

    assert [record.message for record in caplog.records] == ["store unavailable, each replica counts for itself"]


# --- Sentinel and Cluster


def test_tags_spread_evenly() -> None:
    """Each hash tag's slot lies in a share of the slots of its own."""
    assert sorted(find_slot(tag) * TAGS // SLOTS for tag in spread_tags(TAGS)) == list(range(TAGS))


def test_cluster_keys_lie_in_few_slots_on_every_primary(six: list[Server]) -> None:
    """Keys use at most 16 slots; every primary has its share, and gets a batch of its own."""
    with Driver("redis+cluster://" + six[1].address) as driver:
        hits = [make_hit(key=str(number), window_ms=3_600_000) for number in range(300)]
        for start in range(0, 300, 100):
            driver.count(hits[start : start + 100])

        slots = {six[0].client().cluster("keyslot", key) for node in six[:3] for key in node.client().keys("loopguard:*")}
        sizes = [node.client().dbsize() for node in six[:3]]
        assert len(slots) <= TAGS
        assert min(sizes) > 300 / 3 / 2
        assert driver.metric("store_batch_size_count") == 3 * 3


def test_an_acl_user_of_a_cluster_with_the_least_rights(six: list[Server]) -> None:
    """A cluster asks for one more right than a single server does: to ask who has which slots."""
    for node in six:
        node.client().execute_command("ACL", "SETUSER", "counter", "on", f">{SECRET}", *ACL.split(), "+cluster|slots")

    with Driver(f"redis+cluster://counter:{SECRET}@{six[0].address}") as driver:
        driver.count([make_hit(kind, key=f"{kind}-{number}") for kind in WINDOW_TYPES for number in range(50)])

        assert driver.store.health() == "ok"


def test_a_cluster_batch_is_few_commands(six: list[Server]) -> None:
    """A batch of 200 hits takes at most one script call per hash tag."""
    with Driver("redis+cluster://" + six[0].address) as driver:
        driver.count([make_hit(key=str(number)) for number in range(200)])
        before = sum(node.commands()["evalsha"] for node in six[:3])

        driver.count([make_hit(key=str(number)) for number in range(200)])

        assert sum(node.commands()["evalsha"] for node in six[:3]) - before <= TAGS


def test_who_has_which_slots_is_asked_of_one_node_after_the_other(six: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that was cut off and believes in owners of old is not asked again before the others were."""
    monkeypatch.setattr(topology, "_SENTINEL_SECONDS", PATIENCE)  # a busy machine is no node that was cut off
    slots = ClusterLayout([ServerAddress("127.0.0.1", six[0].port)], Access(), TAGS)

    async def asked() -> list[ServerAddress]:
        found = []
        for _ in six:
            await slots.learn()
            found.append(slots._known[-1])
        return found

    assert {place.port for place in asyncio.run(asked())} == {node.port for node in six}


def test_slots_that_move_are_followed(six: list[Server]) -> None:
    """While a slot's keys move to another primary, and after, every hit is counted where its key is; a board follows after."""
    source, target = six[0], six[1]
    with Driver("redis+cluster://" + six[2].address) as driver:
        tag = next(tag for tag in spread_tags(TAGS) if find_slot(tag) < SLOTS // 3)
        numbers = [number for number in range(256) if spread_tags(TAGS)[number % TAGS] == tag]
        hits = [make_hit(window_ms=600_000, threshold=100, key=f"moving:{number:02x}") for number in numbers]

        def count() -> list[int]:
            async def counted() -> list[int]:
                return [answer.count for answer in await cast("Any", driver.store.hit(hits))]

            return driver.run(counted())

        board = next(name for name in map(str, range(256)) if spread_tags(TAGS)[zlib.crc32(name.encode()) % TAGS] == tag)
        driver.run(driver.store.documents.put(BOARDS, board, "a", b"x", 60))

        assert count() == [1] * len(hits)
        ids = [node.client().execute_command("CLUSTER", "MYID").decode() for node in (source, target)]
        target.client().execute_command("CLUSTER", "SETSLOT", find_slot(tag), "IMPORTING", ids[0])
        source.client().execute_command("CLUSTER", "SETSLOT", find_slot(tag), "MIGRATING", ids[1])
        keys = source.client().keys("loopguard:*moving*")
        for key in keys[::2]:
            source.client().migrate("127.0.0.1", target.port, key, 0, 1_000)

        assert count() == [2] * len(hits)
        for key in source.client().execute_command("CLUSTER", "GETKEYSINSLOT", find_slot(tag), 10_000):
            source.client().migrate("127.0.0.1", target.port, key, 0, 1_000)
        for node in (target, source, six[2]):
            node.client().execute_command("CLUSTER", "SETSLOT", find_slot(tag), "NODE", ids[1])

        assert count() == [3] * len(hits)
        assert driver.store.health() == "ok"
        assert driver.read(BOARDS, board) == {"a": b"x"}


def test_sessions_in_slots_that_move_are_followed(six: list[Server]) -> None:
    """While a slot's keys move to another primary every session is found where its ledger is, and new ones begin."""
    source, target = six[0], six[1]
    with Driver("redis+cluster://" + six[2].address) as driver:
        tag = next(tag for tag in spread_tags(TAGS)[1:] if find_slot(tag) < SLOTS // 3)
        digits = f"{spread_tags(TAGS).index(tag):02x}"
        tenant = f"sessions:{digits}"
        limits = limit(idle_ms=600_000)

        def step(number: int, sessions: int) -> list[int]:
            steps = [make_step(number, limits, key=f"walking:{name}:{digits}", tenant=tenant) for name in range(sessions)]
            return [standing.steps for standing in driver.account(steps)]

        assert step(1, 20) == [1] * 20
        ids = [node.client().execute_command("CLUSTER", "MYID").decode() for node in (source, target)]
        target.client().execute_command("CLUSTER", "SETSLOT", find_slot(tag), "IMPORTING", ids[0])
        source.client().execute_command("CLUSTER", "SETSLOT", find_slot(tag), "MIGRATING", ids[1])
        for key in source.client().keys("loopguard:*walking*")[::2]:
            source.client().migrate("127.0.0.1", target.port, key, 0, 1_000)

        assert step(2, 25) == [2] * 20 + [1] * 5
        for key in source.client().execute_command("CLUSTER", "GETKEYSINSLOT", find_slot(tag), 10_000):
            source.client().migrate("127.0.0.1", target.port, key, 0, 1_000)
        for node in (target, source, six[2]):
            node.client().execute_command("CLUSTER", "SETSLOT", find_slot(tag), "NODE", ids[1])

        assert step(3, 25) == [3] * 20 + [2] * 5
        assert driver.store.health() == "ok"


@pytest.fixture(scope="module")
def three() -> Iterator[list[Server]]:
    """A cluster of three primaries that have no replicas; a test has to leave it well."""
    with cluster(replicas=False, full=False) as nodes:
        yield nodes


def name_keys(number: int, node: int) -> list[str]:
    """That many keys of a third of a cluster's slots."""
    tags = spread_tags(TAGS)
    mine = [f"{place:02x}" for place in range(256) if find_slot(tags[place % TAGS]) * 3 // SLOTS == node]
    return [f"{turn}:{mine[turn % len(mine)]}" for turn in range(number)]


def _count_each(driver: Driver, keys: list[str]) -> list[int | str]:
    """The counts, each asked for alone, or kinds of errors; keys have their digits already."""

    async def counted(key: str) -> int | str:
        try:
            answers = await cast("Any", driver.store.hit([make_hit(key=driver.name(key), window_ms=600_000, threshold=100)]))
        except StoreError as error:
            return error.kind
        return cast("int", answers[0].count)

    async def all_counted() -> list[int | str]:
        return [await counted(key) for key in keys]

    return driver.run(all_counted())


def _well(driver: Driver) -> bool:
    driver.run(asyncio.sleep(0.02))
    return driver.store.health() == "ok"


SHARD_TROUBLES = {"down": (_kill, Server.start), "hung": (Server.hang, Server.resume)}


@pytest.mark.parametrize("trouble", SHARD_TROUBLES)
def test_a_shard_that_is_away_takes_its_own_keys_alone_with_it(
    three: list[Server], trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of the other primaries are counted as before, without one error; log, health and metrics name the shard."""
    caplog.set_level(logging.INFO, "loopguard")
    harm, cure = SHARD_TROUBLES[trouble]
    lost, *others = [name_keys(20, node) for node in (1, 0, 2)]
    kept = [key for keys in others for key in keys]
    with Driver(f"redis+cluster://{three[0].address}", store_timeout=AWAY_AFTER) as driver:
        assert set(_count_each(driver, [*lost, *kept])) == {1}
        harm(three[1])
        eventually(lambda: _count_each(driver, lost[:1]) == ["unavailable"], "the outage")

        refused, counted = _count_each(driver, lost), _count_each(driver, kept)
        up = {node.address: driver.metric("store_up", shard=node.address) for node in three}
        health = driver.store.health()
        cure(three[1])
        eventually(lambda: _well(driver), "the recovery")

        assert set(refused) == {"unavailable"}
        assert set(counted) == {2}
        assert up == {three[0].address: 1, three[1].address: 0, three[2].address: 1}
        assert health.startswith(f"1 of 3 shards unavailable: {three[1].address}: ")
        assert set(_count_each(driver, lost)) <= {1, 2, 3}
        assert driver.metric("store_up", shard=three[1].address) == 1
    told = [(record.message, cast("Any", record).fields["shard"]) for record in caplog.records if record.name == "loopguard"]
    assert told == [
        ("shard of the store unavailable, each replica counts for itself", three[1].address),
        ("shard of the store available again", three[1].address),
    ]


def test_a_request_of_several_shards_is_told_what_the_others_have_counted(three: list[Server]) -> None:
    """Its counts of shards that are there, and which ones lack; nothing is counted twice for that."""
    keys = [name_keys(1, node)[0] for node in range(3)]
    hits = [make_hit(key=f"several:{key}", window_ms=600_000, threshold=100) for key in keys]
    with Driver(f"redis+cluster://{three[0].address}", store_timeout=AWAY_AFTER) as driver:
        driver.run(_settled(driver, hits))
        three[1].hang()
        try:
            first = driver.run(_settled(driver, hits))
            second = driver.run(_settled(driver, hits))
            alone = driver.run(_settled(driver, [hits[1], replace(hits[1], key=f"x{hits[1].key}")]))
        finally:
            three[1].resume()
        eventually(lambda: _well(driver), "the recovery")

    for error, count in ((first, 2), (second, 3)):
        assert isinstance(error, PartlyAwayError)
        assert [answer and answer.count for answer in error.answers] == [count, None, count]
    assert isinstance(alone, StoreError)
    assert not isinstance(alone, PartlyAwayError)


async def _settled(driver: Driver, hits: Sequence[Question]) -> Any:  # noqa: ANN401  # answers or the error
    try:
        return await cast("Any", driver.store.hit(hits))
    except StoreError as error:
        return error


def test_where_such_requests_are_refused_nothing_of_them_is_counted(three: list[Server]) -> None:
    """With `reject`, a request that will be refused for one shard leaves no count on another; a settlement is no request."""
    keys = [name_keys(1, node)[0] for node in range(2)]
    hits = [make_hit(key=f"whole:{key}", window_ms=600_000, threshold=100) for key in keys]
    step = make_step(1, NO_LIMITS, key=f"open:{keys[0]}", tenant=f"tenant:{keys[0]}")
    gone = make_step(1, NO_LIMITS, key=f"open:{keys[1]}", tenant=f"tenant:{keys[1]}")
    with Driver(f"redis+cluster://{three[0].address}", on_store_error="reject", store_timeout=AWAY_AFTER) as driver:
        driver.run(_settled(driver, [step]))
        three[1].hang()
        try:
            eventually(lambda: isinstance(driver.run(_settled(driver, hits[1:])), StoreError), "the outage")
            refused = driver.run(_settled(driver, hits))
            settled = driver.run(_settled(driver, [settle_step(step), settle_step(gone)]))
            counted = driver.run(_settled(driver, hits[:1]))
        finally:
            three[1].resume()
        eventually(lambda: _well(driver), "the recovery")

    assert (type(refused), refused.kind) == (StoreError, "unavailable")
    assert counted[0].count == 1
    assert isinstance(settled, PartlyAwayError)
    assert [answer and (answer.steps, answer.retry) for answer in settled.answers] == [(1, False), None]


def test_boards_and_orders_of_the_other_shards_go_on(three: list[Server]) -> None:
    """What operators ask is refused at once where its shard is away, and holds up nothing that lies on another."""
    tags = spread_tags(TAGS)
    names = {find_slot(tags[zlib.crc32(name.encode()) % TAGS]) * 3 // SLOTS: name for name in map(str, range(100))}
    with Driver(f"redis+cluster://{three[0].address}", store_timeout=AWAY_AFTER) as driver:
        store = driver.store
        for name in names.values():
            driver.run(store.documents.put(ORDERS, name, "a", b"x", 60))
        three[1].hang()
        try:
            eventually(lambda: _count_each(driver, name_keys(1, 1)) == ["unavailable"], "the outage")

            with pytest.raises(StoreError) as error:
                driver.run(store.documents.put(BOARDS, names[1], "a", b"x", 60))
            for node in (0, 2):
                driver.run(store.documents.put(BOARDS, names[node], "a", b"x", 60))
                assert driver.read(ORDERS, names[node]) == {"a": b"x"}
                assert driver.read(BOARDS, names[node]) == {"a": b"x"}
        finally:
            three[1].resume()
        eventually(lambda: _well(driver), "the recovery")

        assert error.value.kind == "unavailable"
        assert driver.read(ORDERS, names[1]) == {"a": b"x"}


def test_after_a_failover_the_replica_counts_on() -> None:
    """Keys of a dead primary are found on the replica that took over, which has the counts though not the scripts."""
    lost, kept = name_keys(10, 1), name_keys(10, 0)
    with cluster(full=False) as nodes, Driver(f"redis+cluster://{nodes[0].address}", store_timeout=AWAY_AFTER) as driver:
        assert set(_count_each(driver, [*lost, *kept])) == {1}
        driver.push([make_push("a")])
        eventually(lambda: all(node.client().dbsize() for node in nodes[3:]), "replication")
        nodes[1].hang()
        eventually(lambda: _count_each(driver, lost[:1]) == ["unavailable"], "the outage")
        assert set(_count_each(driver, kept)) == {2}

        eventually(lambda: _well(driver) and _count_each(driver, lost[:1]) != ["unavailable"], "the failover")

        assert set(_count_each(driver, lost[1:])) == {2}
        assert driver.metric("store_up", shard=nodes[4].address) == 1
        assert driver.metrics.registry.get_sample_value("loopguard_store_up", {"shard": nodes[1].address}) is None
        nodes[1].resume()
        assert set(_count_each(driver, kept)) == {3}
        assert driver.store.health() == "ok"


def test_a_cluster_that_cannot_be_asked_is_one_outage(caplog: pytest.LogCaptureFixture) -> None:
    """Without a node that says who has what, everything is away at once; each shard is tried once they are known."""
    caplog.set_level(logging.INFO, "loopguard")
    with server() as gone:
        pass
    with Driver(f"redis+cluster://{gone.address}") as driver:
        assert driver.store.health().startswith(f"unavailable: no node of the cluster answers: {gone.address}: ")
        assert driver.metric("store_up", shard="unassigned") == 0
        assert set(_count_each(driver, ["a:00", "b:0f"])) == {"unavailable"}
    assert [record.message for record in caplog.records] == ["store unavailable, each replica counts for itself"]


def test_a_server_of_a_cluster_is_not_a_single_one(six: list[Server]) -> None:
    """`redis://` on a node of a cluster says which scheme is right."""
    with Driver(f"redis://{six[0].address}") as driver:
        for number in range(20):
            try:
                driver.count([make_hit(key=str(number))])
            except StoreError:
                break

        assert "use redis+cluster://" in driver.store.health()


def test_sentinels_name_the_primary_and_its_successor() -> None:
    """The store counts on the primary that Sentinels name, and after a failover on the one that took over."""
    with sentinels() as (watchers, primary, replica):
        watchers[0].kill()
        hosts = ",".join(watcher.address for watcher in watchers)
        with Driver(f"redis+sentinel://{hosts}/counts", store_timeout=1) as driver:
            assert driver.count([make_hit(window_ms=600_000)])[0].count == 1
            eventually(lambda: replica.client().dbsize() >= 1, "replication")
            primary.kill()

            eventually(lambda: driver.run(asyncio.sleep(0.05)) or not _refused(driver), "the failover")

            assert driver.count([make_hit(window_ms=600_000)])[0].count >= 3
            assert replica.client().role()[0] == b"master"
        with Driver(f"redis+sentinel://{hosts}/other") as driver:
            assert "does not watch other" in driver.store.health()
        replica.client().config_set("requirepass", SECRET)
        for watcher in watchers[1:]:
            watcher.client().execute_command("ACL", "SETUSER", "default", "resetpass", f">{SECRET}")
        with Driver(f"redis+sentinel://:{SECRET}@{hosts}/counts/1") as driver:
            assert driver.store.health() == "ok"
            assert driver.count([make_hit()])[0].count == 1
            assert replica.client(password=SECRET, db=1).exists(f"loopguard:{driver.key(make_hit())}")


def test_a_promoted_replica_counts_on() -> None:
    """A replica that becomes the primary has the counts, though not the scripts."""
    with replicated() as (primary, replica), Driver(f"redis://{primary.address}") as before:
        assert [before.count([make_hit(window_ms=600_000)])[0].count for _ in range(2)] == [1, 2]
        eventually(lambda: replica.client().dbsize() >= 1, "replication")
        replica.client().replicaof("NO", "ONE")

        with Driver(f"redis://{replica.address}") as after:
            after._name = before._name

            assert after.count([make_hit(window_ms=600_000)])[0].count == 3
