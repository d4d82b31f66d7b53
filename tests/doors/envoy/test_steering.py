"""Steering through Envoy: what the upstream gets, what the client sees, and what is unchanged."""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from extproc.request.hash_key import read_hash_key
from extproc.request.notes import END, OPENING, Marks, cut_notes, hash_words
from tests.support.documents import bundle, policy
from tests.support.harness import Seen, Stack, stack
from tests.support.looping import looping
from tests.support.uploads import Upload, send

KEYS: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
STEER: dict[str, Any] = {
    "similarity": "turns",
    "action": "steer",
    "escalate": {"reject": 5},
    **KEYS,
}
PATH = "/v1/chat/completions"
POLICIES = bundle(
    policy("steer", {"pathExact": PATH}, **STEER),
    policy("both", {"pathExact": "/both"}, **STEER),
    policy(
        "held", {"pathExact": "/both"}, action="throttle", threshold_identical_requests=2, **KEYS
    ),
    policy(
        "counted", {"pathExact": "/counted"}, action="steer", threshold_identical_requests=2, **KEYS
    ),
)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("key") / "hash.key"
    file.write_text("0123456789abcdef" * 4 + "\n")
    return file


@pytest.fixture
def check_note(key_file: Path, user: dict[str, str]) -> Callable[[Seen, bytes], None]:
    marks = Marks(
        read_hash_key(str(key_file)), [f"x-user-id={user['x-user-id']}"], hash_words("go")
    )

    def check(seen: Seen, sent: bytes) -> None:
        assert len(seen.body) > len(sent)
        assert cut_notes(seen.body, lambda: marks) == sent
        note = json.loads(seen.body)["messages"][-1]["content"].removeprefix("no such file\n\n")
        assert note.startswith(f"{OPENING}\nLoop detected: 3 of the last 3 turns were read_file")
        assert note.endswith(END)
        assert seen.header("content-length") == str(len(seen.body))
        assert seen.header("x-loopguard-steered") == "1"
        assert seen.header("x-fairvisor-warning") == "loop_steer"

    return check


@pytest.fixture(scope="module", params=["fast", "grpcio"])
def gate(request: pytest.FixtureRequest, key_file: Path) -> Iterator[Stack]:
    with stack(POLICIES, "--transport", request.param, "--hash-key-file", str(key_file)) as made:
        yield made


def stuck(size: int = 0, times: int = 3) -> bytes:
    return looping(times, metadata={"padding": "x" * size})


@pytest.mark.parametrize(
    ("size", "http2", "length"),
    [(0, False, False), (0, True, True), (700_000, False, True), (700_000, True, False)],
)
def test_upstream_gets_the_note_in_every_form(
    gate: Stack,
    user: dict[str, str],
    check_note: Callable[[Seen, bytes], None],
    size: int,
    http2: bool,
    length: bool,
) -> None:
    sent = stuck(size)

    answer = send(gate.envoy.port, Upload(PATH, sent, http2, length, trailers=False, headers=user))

    assert (answer.status, answer.headers["x-fairvisor-warning"]) == (200, "loop_steer")
    check_note(gate.upstream.seen[-1], sent)


def test_access_log_and_metrics_report_the_steering(gate: Stack, user: dict[str, str]) -> None:
    before = gate.loopguard.metric("requests_total", policy="counted", action="steer")

    answers = [gate.post("/counted", stuck(), user) for _ in range(2)]

    assert [answer.headers.get("x-fairvisor-warning") for answer in answers] == [None, "loop_steer"]
    entry = gate.envoy.logged("/counted", loop_action="steer")
    assert (entry["status"], entry["loop_policy"], entry["loop_warning"]) == (
        200,
        "counted",
        "loop_steer",
    )
    assert gate.loopguard.metric("requests_total", policy="counted", action="steer") == before + 1


def test_held_request_gets_its_note(
    gate: Stack, user: dict[str, str], check_note: Callable[[Seen, bytes], None]
) -> None:
    sent = stuck()

    answers = [gate.post("/both", sent, user) for _ in range(2)]

    assert [answer.headers["x-fairvisor-warning"] for answer in answers] == ["loop_steer"] * 2
    check_note(gate.upstream.seen[-1], sent)


def test_compressed_body_passes_unchanged_with_a_warning(gate: Stack, user: dict[str, str]) -> None:
    sent = gzip.compress(stuck(), mtime=0)

    gate.post("/counted", sent, {**user, "content-encoding": "gzip"})
    answer = gate.post("/counted", sent, {**user, "content-encoding": "gzip"})

    assert (answer.status, answer.headers["x-fairvisor-warning"]) == (200, "loop_warn")
    assert gate.upstream.seen[-1].body == sent
    assert gate.upstream.seen[-1].header("x-loopguard-steered") is None
    assert (
        gate.loopguard.metric("unsteered_total", policy="counted", reason="content_encoding") >= 1
    )


# ---- One hash key for all Loopguards that meet a note


def test_gateway_and_sidecar_add_one_note(user: dict[str, str], key_file: Path) -> None:
    flags = ["--hash-key-file", str(key_file)]
    with (
        stack(POLICIES, *flags) as sidecar,
        stack(POLICIES, *flags, upstream=f"127.0.0.1:{sidecar.envoy.port}") as gateway,
    ):
        assert gateway.post(PATH, stuck(), user).status == 200

        assert sidecar.upstream.seen[-1].body.count(OPENING.encode()) == 1
        assert sidecar.upstream.seen[-1].header("x-loopguard-steered") == "1"
        assert sidecar.loopguard.metric("requests_total", policy="steer", action="steer") == 1
