"""The hash key: read from a file, or shared by all replicas in the store."""

import asyncio
import json
import logging
from base64 import b64encode
from pathlib import Path
from typing import cast

import pytest

from extproc.cli.main import main
from extproc.errors import StoreError, UsageError
from extproc.request.hash_key import HashKey, read_hash_key
from extproc.request.notes import Marks, frame_note, hash_words
from extproc.store import Store
from extproc.store.key_sharing import KeySharing
from tests.support.access_logs import USER, make_record, write_lines
from tests.support.documents import bundle, policy
from tests.support.engine import ANY
from tests.support.harness import Loopguard, eventually, write_policies
from tests.support.looping import looping
from tests.support.servers import server

SECRET = bytes(range(32))


class SharedStore:
    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.error: Exception | None = None

    async def share_secret(self, name: str, secret: bytes) -> bytes:
        if self.error is not None:
            raise self.error
        return self.kept.setdefault(name, secret)


# --- files


def test_key_file_determines_the_key(tmp_path: Path) -> None:
    contents = [
        SECRET,
        SECRET.hex().encode(),
        SECRET.hex().encode() + b"\n",
        SECRET.hex().encode() + b"\r\n",
        bytes(32),
    ]
    keys = []
    for number, content in enumerate(contents):
        file = tmp_path / str(number)
        file.write_bytes(content)
        keys.append(read_hash_key(str(file)).secret)

    assert [len(key) for key in keys] == [32] * 5
    assert keys[1] == keys[2] == keys[3]
    assert len(set(keys)) == 3
    assert read_hash_key("").secret != read_hash_key("").secret


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "No such file or directory"),
        (
            b"",
            (
                "it holds 0 bytes; it must hold 32 to 4096 random bytes, such as those of: openssl "
                "rand -hex 32"
            ),
        ),
        (b"x" * 31, "it holds 31 bytes; it must hold 32 to 4096 random bytes"),
        (b"x" * 4_097, "it holds more than 4096 bytes; it must hold 32 to 4096 random bytes"),
    ],
)
def test_invalid_key_file_is_a_usage_error(
    tmp_path: Path, content: bytes | None, told: str
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(UsageError) as found:
        read_hash_key(str(file))

    assert str(found.value).startswith(f"--hash-key-file {file}: {told}")


def test_key_is_not_shown() -> None:
    shown = f"{HashKey(SECRET)!r} {HashKey(SECRET)}"

    assert SECRET.hex() not in shown
    assert repr(SECRET)[2:-1] not in shown


def test_hashes_differ_by_purpose() -> None:
    hashes = [HashKey(SECRET).start(purpose, 8).hexdigest() for purpose in (b"note", b"other")]

    assert hashes[0] != hashes[1]


# --- the store


def share(key: HashKey, store: SharedStore) -> KeySharing:
    sharing = KeySharing(key, cast("Store", store))
    asyncio.run(sharing.refresh())
    return sharing


def test_unavailable_store_is_reported_once_and_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "loopguard")
    key, store = HashKey(), SharedStore()
    own = key.secret
    store.kept["hash:1"] = SECRET
    store.error = StoreError("down", kind="connection")

    sharing = share(key, store)
    asyncio.run(sharing.refresh())
    assert (key.secret, sharing.is_shared) == (own, False)
    store.error = None
    asyncio.run(sharing.refresh())

    assert (key.secret, sharing.is_shared) == (SECRET, True)
    assert [record.message for record in caplog.records] == [
        (
            "cannot read the hash key from the store, so this process uses its own: others do not "
            "recognise its notes and callers"
        ),
        (
            "the hash key now comes from the store: notes and callers of another key are no longer "
            "recognised"
        ),
    ]


@pytest.mark.parametrize("error", [StoreError("down", kind="connection"), ValueError()])
def test_known_key_outlives_the_store(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    key, later, store = HashKey(), HashKey(), SharedStore()
    given = key.secret

    sharing = share(key, store)
    store.error = error
    asyncio.run(sharing.refresh())
    store.error = None
    store.kept.clear()
    asyncio.run(sharing.refresh())
    share(later, store)

    assert key.secret == later.secret == given
    assert [record.message for record in caplog.records] == [
        "cannot read the hash key from the store, so this process uses the last known one"
    ]


# --- processes


def start(folder: Path, name: str, *arguments: str) -> Loopguard:
    below = folder / name
    below.mkdir()
    write_policies(below, bundle(policy("p", {"pathPrefix": "/"})))
    return Loopguard(below, *arguments)


@pytest.mark.parametrize("scheme", ["redis", "unix"])
def test_servers_on_one_store_have_one_key(tmp_path: Path, scheme: str) -> None:
    with server() as one:
        url = f"redis://{one.address}" if scheme == "redis" else f"unix://{one.socket}"
        guards = [
            start(tmp_path, name, "--store", url, "--log-level", "debug") for name in ("a", "b")
        ]
        try:
            kept = one.client().get("loopguard:secret:hash:1")
            told = "".join(
                [
                    guard.output() + guard.get("/policies")[1] + guard.get("/metrics")[1]
                    for guard in guards
                ]
            )
            ttl = one.client().ttl("loopguard:secret:hash:1")
        finally:
            for guard in guards:
                guard.stop()

    assert isinstance(kept, bytes)
    assert (len(kept), ttl, told.count("hash_key=store")) == (32, -1, 2)
    assert kept.hex() not in told
    assert repr(kept)[2:-1] not in told


def test_invalid_shared_key_is_not_used(tmp_path: Path) -> None:
    with server() as one:
        one.client().set("loopguard:secret:hash:1", "short")
        guard = start(tmp_path, "a", "--store", f"redis://{one.address}")
        try:
            assert "hash_key=process" in guard.output()
            assert (
                "the value of loopguard:secret:hash:1 is not a secret of 32 bytes" in guard.output()
            )
            assert eventually(lambda: guard.get("/readyz")[0] == 200)
        finally:
            guard.stop()


# --- commands


def noted_bodies(key: HashKey) -> list[bytes]:
    note = frame_note("Loop detected.", Marks(key, ["x-user-id=ann"], hash_words("go")))
    noted = json.loads(rb'"no such file\n\n%b"' % note)
    return [looping(1), looping(1, result=noted), looping(1)]


@pytest.mark.parametrize("given", [True, False])
def test_commands_use_the_key_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: bool
) -> None:
    (tmp_path / "key").write_bytes(SECRET)
    policies = tmp_path / "p.json"
    policies.write_text(json.dumps(bundle(policy("p", ANY, similarity="canonical", **USER))))
    bodies = noted_bodies(read_hash_key(str(tmp_path / "key")))
    lines = [
        make_record(number, body=None, body_base64=b64encode(data).decode())
        for number, data in enumerate(bodies)
    ]
    (tmp_path / "access.log").write_bytes(write_lines(lines))
    flags = [
        "--policy",
        str(policies),
        *(["--hash-key-file", str(tmp_path / "key")] if given else []),
    ]

    names = []
    for data in bodies:
        assert (
            main(["explain", *flags, "-H", "x-user-id: ann", "-d", data.decode(), "h/v1/chat"]) == 0
        )
        names += [
            line for line in capsys.readouterr().out.splitlines() if line.startswith("fingerprint")
        ]
    assert main(["replay", *flags, "--json", str(tmp_path / "access.log")]) == 0

    assert len(set(names)) == (1 if given else 2)
    assert json.loads(capsys.readouterr().out)["policies"][0]["refused"] == (1 if given else 0)


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"],
        ["explain", "h/"],
        ["replay", "access.log"],
    ],
)
def test_command_fails_without_its_key_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    policies = tmp_path / "p.json"
    policies.write_text(json.dumps(bundle(policy("p", ANY, **USER))))

    assert main([*command, "--policy", str(policies), "--hash-key-file", f"{tmp_path}/none"]) == 2
    assert (
        capsys.readouterr().err
        == f"loopguard: --hash-key-file {tmp_path}/none: No such file or directory\n"
    )
