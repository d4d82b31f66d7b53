"""The `loopguard` command: what it prints, and its exit codes."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import urlsafe_b64encode
from importlib import metadata
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

import extproc
from extproc.cli.commands import COMMANDS
from extproc.detectors.tool_calls import NO_CALLS
from extproc.errors import BundleErrors
from extproc.logs import escape_controls
from extproc.policy.bundle import Policy, make_schema
from extproc.server import Server
from extproc.settings import Settings
from tests.support.budget_policies import REJECT, limited, rule
from tests.support.bundles import DOCUMENTS, ENTRIES, FULL, SPEC_FIELDS, entries, spec
from tests.support.command import GOOD, NOT_ENFORCED, WITH_RULES, Run, written
from tests.support.documents import bundle, policy
from tests.support.extent import deepen

pytestmark = [pytest.mark.usefixtures("_no_settings"), pytest.mark.compiled]  # what explains is compiled


# validate


@pytest.mark.parametrize("way", ["flag", "variable"])
def test_validate_warns(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Where they are allowed, parts that are not enforced are warnings, each with its place, and the exit code stays 0."""
    one = written(tmp_path / "one.json", bundle(WITH_RULES, kill_switches=[{"scope_key": "ip:asn", "scope_value": "64496"}]))
    two = written(tmp_path / "two.json", policy("q", {"pathExact": "/b"}))
    if way == "variable":
        monkeypatch.setenv("LOOPGUARD_ALLOW_UNENFORCED", "true")

    run = Run(capsys, "validate", *(["--allow-unenforced"] if way == "flag" else []), one, two)

    assert (run.code, run.out) == (0, "good: 2 policies in 2 files\n")
    stops = "the descriptor ip:asn cannot be derived by Loopguard, so this kill switch stops no one"
    assert run.err.splitlines() == [
        f"warning: {two}: /spec: no limit_keys: all callers of policy q share its counts",
        f"warning: {one}: /kill_switches/0: {stops}",
        f"warning: {one}: {NOT_ENFORCED}",
    ]
    assert Run(capsys, "validate", "--strict", one, two).code == 1
    assert Run(capsys, "validate", "--strict", "--allow-unenforced", one).code == 2


def test_validate_knows_teams(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It refuses what `serve` would refuse a team's folder, and with --strict names policies of different files that meet."""
    for name, prefix in (("a", "/"), ("b", "/b")):
        (tmp_path / f"{name}.json").write_text(json.dumps(policy(f"{name}-p", {"pathPrefix": prefix}, limit_keys=["jwt:org"])))
    paths = [f"{tmp_path}/a.json", f"{tmp_path}/b.json"]
    named = f"a-p ({paths[0]}) and b-p ({paths[1]})"
    runs = [Run(capsys, "validate", *flags, *paths) for flags in ([], ["--strict"])]
    good = Run(capsys, "validate", "--namespace-of", f"{paths[1]}=path:/b", *paths)
    bad = Run(capsys, "validate", "--namespace-of", f"{paths[0]}=path:/a", "--namespace-of", f"{paths[1]}=path:/b", *paths)
    misspelt = Run(capsys, "validate", "--namespace-of", "teams/b=path:/b", *paths)

    assert [(run.code, named in run.err) for run in runs] == [(0, False), (0, True)]
    assert (good.code, bad.code, misspelt.code) == (0, 1, 2)
    assert f"{paths[0]}: /spec/selector: must name a path, and only paths below /a" in bad.err


def test_validate_notes_what_a_default_means(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A note says what becomes of requests without limit keys where a policy does not: one line for all such policies."""
    silent = [policy(name, {"pathExact": "/b"}, limit_keys=["jwt:org_id"]) for name in ("q", "r", "s")]
    told = [policy(name, {"pathExact": "/b"}, limit_keys=["jwt:a"], missing_descriptor=name) for name in ("share", "skip")]
    always = policy("t", {"pathExact": "/b"}, limit_keys=["header:Host", "jwt:org_id", "ip:address"])
    moot = policy("u", {"pathExact": "/b"}, limit_keys=["ip:address"])
    file = written(tmp_path / "p.json", bundle(*silent, *told, always, moot))

    run = Run(capsys, "validate", "--strict", file)

    assert (run.code, run.out) == (0, "good: 7 policies in 1 file\n")
    uncounted = "requests with none of the limit keys are not counted (default: require_one)"
    shared = "with share, they share one count"
    alone = "so requests without the other limit keys are counted by that alone"
    assert run.err.splitlines() == [
        f"note: {file}: /policies/0/spec: missing_descriptor is not set: {uncounted}; {shared} (and 2 more)",
        f"note: {file}: /policies/5/spec/limit_keys: every request has header:host and ip:address, {alone}",
    ]


async def make_server(settings: Settings) -> Server:
    """A server that does not listen yet."""
    return Server(settings)


PARTS: list[dict[str, object]] = [
    {"fallback_limit": {"requests": 1}},
    {"circuit_breaker": {}},
    {"circuit_breaker": {"spend_rate_threshold_per_minute": 1}},
    {"circuit_breaker": {"enabled": False}},
    {"limit_keys": ["ip:country"]},
    {"session": {"keys": ["ua:bot"]}},
]
UNENFORCED = [
    bundle(WITH_RULES),
    bundle(kill_switches=[{"scope_key": "ua:bot", "scope_value": "true"}]),
    *({"id": "p", "spec": {**WITH_RULES["spec"], "rules": [], **part}} for part in PARTS),
]
BUNDLES: list[object] = [
    *(document for document, _ in DOCUMENTS),
    *(spec(**{name: value}) for name, value, _ in SPEC_FIELDS),
    *(entries(changes) for changes, _ in ENTRIES),
    *UNENFORCED,
    *(path.read_bytes() for path in Path(extproc.__file__).parent.glob("policy/presets/*.json")),
    [FULL, GOOD | {"id": "q"}],
    bundle(GOOD),
    {"id": "p", "spec": {}},
]


@pytest.mark.slow
@pytest.mark.parametrize("allow", deepen([False, True], False))
def test_validate_takes_what_serve_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path, allow: bool) -> None:
    """For each rule of policy files: the exit code says whether the server would start, for the same errors."""
    missing, flags = str(tmp_path / "missing.json"), ["--allow-unenforced"] if allow else []
    taken, refused = 0, 0
    for number, document in enumerate(BUNDLES):
        files = [written(tmp_path / f"{number}.json", document), *([missing] if number % 9 == 0 else [])]

        run = Run(capsys, "validate", *flags, *files)
        errors = []
        try:
            asyncio.run(make_server(Settings(policy=tuple(files), allow_unenforced=allow)))
        except BundleErrors as error:
            errors = [escape_controls(str(each)) for each in error.errors]

        assert run.code == bool(errors), document
        assert not errors or run.err.splitlines() == errors
        taken, refused = taken + (not errors), refused + bool(errors)
    assert taken > 5
    assert refused > 100


def test_validate_keeps_each_error_on_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A key with a line break in it cannot forge a line of its own."""
    run = Run(capsys, "validate", written(tmp_path / "p.json", {**GOOD, "a\nb": 1}))

    assert run.complaint.endswith(r"/a\nb: unknown key; known keys are id, spec")


# explain


def explained(run: Run) -> list[dict[str, str]]:
    """The blocks that explain printed, one for each policy."""
    assert run.code == 0, run.err
    return [dict(re.split(r"\s+", line, maxsplit=1) for line in block.splitlines()) for block in run.out.strip().split("\n\n")]


def test_explain_shows_the_composite(capsys: pytest.CaptureFixture[str], good: str) -> None:
    """Composite, fingerprint, tenant, key and decision of a real request; the fingerprint is the CRC32 of the composite."""
    body = '{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
    flags = ["--policy", good, "--claim", "org_id=org-abc", "--claim", "user_id=user-1", "-d", body]

    (found,) = explained(Run(capsys, "explain", *flags, "https://api.example.com/v1/chat/completions"))

    composite = f"POST|/v1/chat/completions||{crc32(body.encode()):08x}|org_id=org-abc|user_id=user-1"
    fingerprint = f"{crc32(composite.encode()):08x}"
    assert found["policy"] == "p (enforce)"
    assert found["composite"] == composite
    assert found["fingerprint"] == fingerprint
    assert re.fullmatch(rf"loop:p:default:sliding_ttl::{found['tenant']}:{fingerprint}[0-9a-f]{{16}}", found["key"])
    assert found["decision"] == "allow 2 identical requests, then reject with 429 (Retry-After: 60); window sliding_ttl, 60 s"


TOKEN = "authorization: Bearer e30." + urlsafe_b64encode(b'{"org_id": "o"}').decode().rstrip("=") + ".x"


@pytest.mark.parametrize(
    ("limit_key", "flags", "url", "composite"),
    [
        ("jwt:org_id", [], "h/a", "GET|/a||00000000"),
        ("jwt:org_id", ["-H", TOKEN], "h/a", "GET|/a||00000000"),
        ("jwt:org_id", ["-H", TOKEN, "--allow-unverified-jwt"], "h/a", "GET|/a||00000000|org_id=o"),
        ("header:x-user", ["-H", "X-User:  ann ", "-H", "x-user: bob"], "h/a", "GET|/a||00000000|x-user=ann"),
        ("header:host", ["-H", "Host: other:1"], "http://u@h:80/a", "GET|/a||00000000|host=other:1"),
        ("header:host", [], "http://u@h:80/a", "GET|/a||00000000|host=h:80"),
        ("query:q", ["-X", "PUT"], "http://h/a?z=1&q=a+b%7C&q=2#f", "PUT|/a|q=2&q=a b%7C&z=1|00000000|q=a b%7C"),
        ("ip:address", ["--address", "2001:db8::1"], "h/a", "GET|/a||00000000|address=2001:db8::1"),
        ("ip:address", ["-d", "", "-X", "DELETE"], "/a", "DELETE|/a||00000000|address=127.0.0.1"),
        ("ip:address", ["-d", "x"], "h/a\udcff", f"POST|/a\\udcff||{crc32(b'x'):08x}|address=127.0.0.1"),
    ],
)
def test_explain_takes_requests_like_curl(  # a table's columns
    capsys: pytest.CaptureFixture[str], tmp_path: Path, limit_key: str, flags: list[str], url: str, composite: str
) -> None:
    """Method, headers, body and URL mean what they mean to curl; the rest of what Envoy knows has flags."""
    file = written(tmp_path / "p.json", policy("p", {"pathPrefix": "/"}, limit_keys=[limit_key], missing_descriptor="share"))

    (found,) = explained(Run(capsys, "explain", "--policy", file, *flags, url))

    assert found["composite"] == composite


def test_explain_reads_a_body_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, good: str) -> None:
    """`-d @file` is the file's bytes, unchanged."""
    body = b"\xff\r\n"
    (tmp_path / "body").write_bytes(body)

    (found,) = explained(
        Run(capsys, "explain", "--policy", good, "--claim", "org_id=o", "-d", f"@{tmp_path}/body", "h/v1/chat/completions")
    )

    assert found["composite"] == f"POST|/v1/chat/completions||{crc32(body):08x}|org_id=o"


@pytest.mark.parametrize(
    ("mode", "more", "decision"),
    [
        ("enforce", {"action": "warn"}, "then warn; "),
        ("enforce", {"action": "throttle"}, "then throttle (hold 300 ms at first); "),
        ("enforce", {"cooldown_seconds": 90, "reject_status": 503}, "then reject with 503 (Retry-After: 90); "),
        (
            "enforce",
            {"refuse_as": "completion"},
            "then reject with an answer of the API, or if that is unknown with 429 (R",
        ),
        ("enforce", {"reject_status": "auto"}, "then reject with 429, or 400 for clients that retry that (Retry-"),
        ("shadow", {"window_type": "fixed"}, "then report: would reject with 429 (Retry-After: 60); window fixed, 60 s"),
    ],
)
def test_explain_says_what_will_be_done(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, mode: str, more: dict[str, object], decision: str
) -> None:
    """The decision names the action of the request that reaches the threshold; a shadow policy only reports."""
    file = written(tmp_path / "p.json", bundle(policy("p", {"pathPrefix": "/"}, mode=mode, **more)))

    (found,) = explained(Run(capsys, "explain", "--policy", file, "h/"))

    assert decision in found["decision"]
    assert found["key"].startswith("shadow:loop:" if mode == "shadow" else "loop:")


@pytest.mark.parametrize(
    ("result", "name", "shown"),
    [
        ("pending", "note", "Loop detected: 3 of the last 3 turns were f with the same input and the same result."),
        (None, "unsteered", "let through with a warning: no_result"),
    ],
)
def test_explain_shows_the_note(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, result: str | None, name: str, shown: str
) -> None:
    """What the model of a policy that steers is told stands in a row of its own, or why it cannot be."""
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"}}
    turn = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": result}]
    file = written(tmp_path / "p.json", policy("p", {"pathPrefix": "/"}, similarity="turns", action="steer"))
    body = json.dumps({"messages": turn * 3})

    (found,) = explained(Run(capsys, "explain", "--policy", file, "-d", body, "h/v1/chat/completions"))

    assert found[name].startswith(shown)
    assert {"note", "unsteered"} & found.keys() == {name}


@pytest.mark.parametrize(
    ("turns", "more", "decision"),
    [
        (0, {}, "allow"),
        (2, {}, "allow"),
        (3, {"tools": {"f": {"allow": True}}}, "allow"),
        (4, {"escalate": {"reject": 4}}, "reject"),
    ],
)
def test_explain_shows_no_note_to_a_request_that_is_not_steered(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, turns: int, more: dict[str, Any], decision: str
) -> None:
    """Neither before the loop, nor where it is refused already."""
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"}}
    turn = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "pending"}]
    file = written(tmp_path / "p.json", policy("p", {"pathPrefix": "/"}, similarity="turns", action="steer", **more))
    body = json.dumps({"messages": [{"role": "user", "content": "go"}, *turn * turns]})

    (found,) = explained(Run(capsys, "explain", "--policy", file, "-d", body, "h/v1/chat/completions"))

    assert found["decision"].startswith(decision)
    assert not {"note", "unsteered"} & found.keys()


@pytest.mark.parametrize(
    ("flags", "shown", "mode", "key"),
    [
        (
            ["-H", "x-user: carl"],
            "in: place 4 of 100 by header:x-user (seed p); the policy acts on places 1 to 25",
            "enforce",
            "",
        ),
        (
            ["-H", "x-user: ann"],
            "out, so in shadow mode: place 29 of 100 by header:x-user (seed p); the policy acts on places 1 to 25",
            "shadow",
            "shadow:",
        ),
        ([], "out, so in shadow mode: the request has no header:x-user", "shadow", "shadow:"),
    ],
)
def test_explain_says_who_is_in_and_why(  # a table's columns
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], shown: str, mode: str, key: str
) -> None:
    """A policy for a share of the callers shows the caller's place, and the key that it counts under."""
    ramped: dict[str, Any] = {"enforce_percent": 25, "limit_keys": ["ip:address"], "ramp_by": ["header:x-user"]}
    items = [policy("p", {"pathPrefix": "/"}, keep_counts=keep, **ramped) for keep in (False, True)]
    files = [written(tmp_path / f"{number}.json", item) for number, item in enumerate(items)]

    found, kept = [explained(Run(capsys, "explain", "--policy", file, *flags, "h/a"))[0] for file in files]

    assert (found["policy"], found["ramp"], found.get("missing")) == (f"p ({mode})", shown, None if flags else "header:x-user")
    assert found["key"].startswith(f"{key}loop:p:")
    assert kept["key"].startswith("shadow:loop:p:")


def test_explain_says_why_a_request_is_not_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A policy that matches but does not count says why; without any match there is one plain line."""
    file = written(
        tmp_path / "p.json", [policy("p", {"pathExact": "/a"}, limit_keys=["jwt:org_id"], missing_descriptor="skip")]
    )

    matched, unmatched = Run(capsys, "explain", "--policy", file, "h/a"), Run(capsys, "explain", "--policy", file, "h/b")

    missing = "jwt:org_id: no claim of that name was verified; give --claim org_id=VALUE"
    assert explained(matched) == [{"policy": "p", "missing": missing, "uncounted": "missing_descriptor"}]
    assert (unmatched.code, unmatched.out) == (0, "no policy matches GET /b: the request passes uncounted\n")


@pytest.mark.parametrize(
    ("flags", "missing", "counted"),
    [
        ([], ["jwt:org_id: no claim of that name was verified; give --claim org_id=VALUE", "header:x-user"], False),
        (["-H", TOKEN], ["jwt:org_id: authorization: Bearer is given, but not verified; see --claim and --allow-", "h"], False),
        (["-H", "x-user: ann"], ["jwt:org_id"], True),
        (["-H", "x-user: ann", "--claim", "org_id=o"], [], True),
    ],
)
def test_explain_says_which_descriptors_are_missing_and_why(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], missing: list[str], counted: bool
) -> None:
    """A caller with none of the keys is not counted; one with some of them is, and the missing ones are shown."""
    file = written(tmp_path / "p.json", policy("p", {"pathPrefix": "/"}, limit_keys=["jwt:org_id", "header:x-user"]))

    run = Run(capsys, "explain", "--policy", file, *flags, "h/a")

    shown = re.findall(r"^missing +(.*)$", run.out, re.MULTILINE)
    assert [line.startswith(start) for line, start in zip(shown, missing, strict=True)] == [True] * len(missing)
    assert ("composite" in run.out, "uncounted" in run.out) == (counted, not counted)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["-H", "content-type: application/grpc+proto", "-H", "te: trailers", "-d", "x"], "grpc"),
        (["-H", "connection: upgrade", "-H", "Upgrade: websocket"], "upgrade"),
        (["-X", "CONNECT"], "connect"),
    ],
)
def test_explain_knows_bodies_that_cannot_be_known(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], reason: str
) -> None:
    """What live traffic leaves uncounted for its body is uncounted here, except by policies that do without bodies."""
    file = written(tmp_path / "p.json", [policy("p", {"pathExact": "/a"}), policy("i", {"pathExact": "/a"}, body="ignore")])

    uncounted, counted = explained(Run(capsys, "explain", "--policy", file, *flags, "h/a"))

    assert uncounted == {"policy": "p", "uncounted": reason}
    assert counted["composite"].endswith("|/a||00000000")


def test_explain_knows_websockets_for_model_calls(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """They are refused, whatever methods a policy names, even by a policy that ignores bodies."""
    posts = {"pathPrefix": "/v1/", "methods": ["POST"]}
    file = written(tmp_path / "p.json", [policy("p", posts), policy("s", posts, body="ignore", mode="shadow")])

    found = explained(Run(capsys, "explain", "--policy", file, "-H", "Upgrade: websocket", "h/v1/responses"))

    refused = {"policy": "p", "decision": "reject with 426", "uncounted": "responses_websocket"}
    assert found == [refused, {"policy": "s", "uncounted": "responses_websocket"}]


LOOPS: dict[str, dict[str, object]] = {
    "exact": {},
    "canonical": {"similarity": "canonical", "ignore_fields": ["/user"]},
    "tail": {"similarity": "tail", "tail_messages": 2},
    "tool_calls": {"similarity": "tool_calls", "window_seconds": None},
    "cool": {
        "similarity": "tool_calls",
        "name": "cool",
        "window_seconds": None,
        "cooldown_seconds": 9,
        "compare_results": False,
    },
}


def looks(file: Path, *names: str, mode: str = "enforce", **spec: object) -> str:
    """A file with a policy for any request that has these detectors."""
    made = policy("p", {"pathPrefix": "/"}, mode=mode)
    made["spec"] |= {"loop_detection": [made["spec"]["loop_detection"] | LOOPS[name] for name in names], **spec}
    return written(file, made)


def called(times: int) -> str:
    """A conversation in which one tool was called so often, with the same argument and result."""
    call = {"id": "c", "function": {"name": "read_file", "arguments": '{"b": 1.0, "a": "X"}'}}
    turn = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "No such file"}]
    return json.dumps({"user": "ann", "model": "m", "messages": [{"role": "user", "content": "Go  ON"}, *turn * times]})


CALL = 'read_file | {"a":"X","b":1}'


def shown(run: Run) -> dict[str, dict[str, str]]:
    """What is shown of each detector; lines without a name of their own belong to the one above."""
    assert run.code == 0, run.err
    found = {}
    for block in run.out.strip().split("\n\n"):
        rows: dict[str, str] = {}
        for line in block.splitlines():
            name, value = line[:12].strip(), line[13:]
            if name:
                rows[name] = value
            else:
                last = next(reversed(rows))
                rows[last] += f"\n{value}"
        found[rows["detector"].partition(" ")[0] if "detector" in rows else "?"] = rows
    return found


@pytest.mark.parametrize("times", [2, 3])
def test_explain_shows_what_each_detector_compares(capsys: pytest.CaptureFixture[str], tmp_path: Path, times: int) -> None:
    """One block for each detector, with its name, its similarity and all that it extracted, in a loop and before one."""
    body = called(times)

    found = shown(Run(capsys, "explain", "--policy", looks(tmp_path / "p.json", *LOOPS), "-d", body, "h/v1"))

    assert list(found) == list(LOOPS)
    assert [found[name]["detector"].partition(" ")[2] for name in LOOPS] == [
        "(exact)",
        "(canonical)",
        "(tail)",
        "(tool_calls)",
        "(tool_calls)",
    ]
    decoded = json.loads(body)
    del decoded["user"]
    assert "compared" not in found["exact"]
    assert found["exact"]["composite"] == f"POST|/v1||{crc32(body.encode()):08x}"
    assert found["canonical"]["compared"] == json.dumps(decoded, sort_keys=True, separators=(",", ":"))
    assert found["tail"]["compared"] == (
        'model | m\nassistant | call | read_file | {"a":"X","b":1}\ntool | result | no such file'
    )
    assert found["tool_calls"]["compared"].splitlines() == [f"{CALL} | result | No such file"] * times
    assert found["cool"]["compared"].splitlines() == [CALL] * times


def test_explain_says_whether_calls_loop(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A loop is acted on by this very request; before one the decision says how far it is; nothing is counted, so no key."""
    file = looks(tmp_path / "p.json", "tool_calls", "cool")

    loop = shown(Run(capsys, "explain", "--policy", file, "-d", called(3), "h/v1"))
    before = shown(Run(capsys, "explain", "--policy", file, "-d", called(2), "h/v1"))
    quiet = shown(Run(capsys, "explain", "--policy", file, "-d", called(0), "h/v1"))

    assert loop["tool_calls"]["decision"] == "reject with 429; read_file: 3 of 3 calls"
    assert loop["cool"]["decision"] == "reject with 429; read_file: 3 of 3 calls"
    assert "3 of the last 3 tool calls were read_file" in loop["cool"]["message"]
    assert "message" not in before["cool"]
    assert before["cool"]["decision"] == ("allow below 3 identical calls, then reject with 429; read_file: 2 of 2 calls")
    nothing = "allow: no call of the last turn, or fewer calls than any threshold"
    assert [block["decision"] for block in (before["tool_calls"], *quiet.values())] == [nothing] * 3
    assert [block["compared"] for block in quiet.values()] == [NO_CALLS] * 2
    assert "key" not in loop["tool_calls"]
    assert re.match(r"loop:p:cool:fixed::[0-9a-f]{16}:[0-9a-f]{24}$", loop["cool"]["key"])
    assert loop["cool"]["fingerprint"] == before["cool"]["fingerprint"]


def test_explain_shows_where_a_session_is_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The key of its ring, of which explain knows nothing; no session, no ring."""
    file = written(tmp_path / "p.json", policy("p", {"pathPrefix": "/"}, similarity="turns", session={}))
    flags = ["explain", "--policy", file, "-d", called(1), "h/v1"]

    inside, outside = shown(Run(capsys, *flags, "-H", "session-id: s")), shown(Run(capsys, *flags))

    ring = inside["default"]["ring"]
    assert re.match(r"ring:p:default::[0-9a-f]{16}:[0-9a-f]{16}: earlier turns, which explain does not read$", ring)
    assert inside["default"]["decision"] == outside["default"]["decision"] == "allow: the newest turn is not part of a loop"
    assert "ring" not in outside["default"]


def test_explain_tells_the_hold_at_the_threshold(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A throttled loop of calls first waits 100 ms for each call of the threshold."""
    loop: dict[str, Any] = {"similarity": "tool_calls", "action": "throttle", "threshold_identical_requests": 4}
    file = written(tmp_path / "p.json", policy("p", {"pathPrefix": "/"}, cooldown_seconds=9, **loop))

    found = shown(Run(capsys, "explain", "--policy", file, "-d", called(3), "h/v1"))

    assert (
        found["default"]["decision"]
        == "allow below 4 identical calls, then throttle (hold 400 ms at first); read_file: 3 of 3 calls"
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], ["rule         a: its match does not hold", "decision     allow: no rule applies"]),
        (["-H", "x-plan: free"], ["rule         a: a limit key is missing", "missing      header:x-api-key"]),
        (["-H", "x-plan: free", "-H", "x-api-key: k"], ["budget       a: 9 in a day", "stage        warn from 80 % on"]),
    ],
)
def test_explain_says_which_rules_apply(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], told: list[str]
) -> None:
    """The stages of those that do, and why the others do not."""
    stages = [{"threshold_percent": 80, "action": "warn"}, *REJECT]
    made = rule("cost_based", "a", more={"match": {"header:x-plan": "free"}}, budget=9, period="1d", staged_actions=stages)
    path = written(tmp_path / "p.json", limited(made))

    printed = Run(capsys, "explain", "--policy", path, *flags, "http://example.com/").out

    assert all(line in printed for line in told), printed


def test_explain_names_a_single_detector_that_looks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A policy with one object is shown as before, unless it looks into bodies."""
    exact = written(tmp_path / "exact.json", policy("p", {"pathPrefix": "/"}))
    tail = written(tmp_path / "tail.json", policy("p", {"pathPrefix": "/"}, similarity="tail"))
    flags = ["-d", called(0), "h/v1"]

    assert "detector" not in Run(capsys, "explain", "--policy", exact, *flags).out
    assert shown(Run(capsys, "explain", "--policy", tail, *flags))["default"] | {
        "composite": "",
        "fingerprint": "",
        "key": "",
    } == {
        "policy": "p (enforce)",
        "detector": "default (tail)",
        "compared": "model | m\nuser | text | go on",
        "composite": "",
        "fingerprint": "",
        "tenant": "e4a6a0577479b2b4",
        "key": "",
        "decision": "allow 2 identical requests, then reject with 429 (Retry-After: 60); window sliding_ttl, 60 s",
    }


@pytest.mark.parametrize(
    ("flags", "reasons"),
    [
        (["-d", "a=1"], ["not_json"] * 3),
        (["-d", "{}"], ["no_messages"] * 3),
        (["-d", '{"prompt": "x"}'], ["no_history"] * 2),
        (["-d", '{"messages": [' + "[" * 100 + "]" * 100 + "]}", "-H", "X-Health: 1"], ["bypass"]),
        (["-d", '{"user": "%s"}' % ("x" * 8_193)], ["descriptor_too_long"] * 5),
        (["-d", json.dumps({"messages": ["x" * 2**20]})], ["inspect_limit"] * 5),
    ],
    ids=["not JSON", "no messages", "no history", "bypass", "descriptor", "large"],
)
def test_explain_says_why_a_detector_does_not_count(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], reasons: list[str]
) -> None:
    """Each detector that cannot look says why, and the others are shown."""
    more: dict[str, Any] = {"limit_keys": ["body:/user"], "missing_descriptor": "share", "bypass": [{"header": "x-health"}]}
    file = looks(tmp_path / "p.json", *LOOPS, **more)

    run = Run(capsys, "explain", "--policy", file, *flags, "h/v1")

    assert run.code == 0
    assert re.findall(r"^uncounted +(\S+)$", run.out, re.MULTILINE) == reasons
    assert len(re.findall(r"^decision ", run.out, re.MULTILINE)) == (0 if reasons == ["bypass"] else len(LOOPS) - len(reasons))


def test_explain_names_the_detector_that_does_not_count(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Where a policy has several, it shows which of them the reason is about."""
    run = Run(capsys, "explain", "--policy", looks(tmp_path / "p.json", "exact", "tail"), "-d", "a=1", "h/v1")

    assert "tail" in run.out.partition("uncounted")[0] + run.out.partition("uncounted")[2].partition("\n\n")[0]


def test_explain_reads_callers_from_the_body(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A descriptor that stands in the body is part of the composite; what is printed of it stays on its line."""
    file = looks(tmp_path / "p.json", "exact", "tail", limit_keys=["body:/user", "body:/metadata/n"])
    body = json.dumps(
        {"user": "ann\nfingerprint  00000000", "metadata": {"n": 7}, "messages": [{"role": "user", "content": "a\nb"}]}
    )

    run = Run(capsys, "explain", "--policy", file, "-d", body, "h/v1")

    found = shown(run)
    assert found["tail"]["composite"].endswith(r"|/metadata/n=7|/user=ann\nfingerprint  00000000")
    assert found["tail"]["compared"] == "model | \nuser | text | a b"
    assert "\nfingerprint  00000000" not in run.out


def test_explain_shows_a_body_that_is_not_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`canonical` says that it compares such a body byte for byte."""
    run = Run(capsys, "explain", "--policy", looks(tmp_path / "p.json", "canonical"), "-d", "a=1", "h/v1")

    assert shown(run)["canonical"]["compared"] == "the body byte for byte: it is not JSON"


def test_validate_knows_every_field_of_a_list(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A policy with every mode is good; one with an error in each is told of them all, with the entry's number."""
    good = looks(
        tmp_path / "good.json", *LOOPS, limit_keys=["body:/user"], missing_descriptor="skip", bypass=[{"header": "x-health"}]
    )
    bad = json.loads(Path(good).read_text())
    first, canonical, tail, calls, _ = bad["spec"]["loop_detection"]
    first["tail_messages"], canonical["ignore_fields"], tail["tail_messages"], calls["max_cycle"] = 3, ["user"], 0, 99
    bad["spec"]["bypass"] = [{"headers": "x"}]

    accepted, refused = Run(capsys, "validate", good), Run(capsys, "validate", written(tmp_path / "bad.json", bad))

    assert (accepted.code, accepted.out) == (0, "good: 1 policy in 1 file\n")
    assert "/loop_detection/3: reject_status is not set: several agents retry a 429 for minutes" in accepted.err
    assert refused.code == 1
    assert [line.removeprefix(f"{tmp_path}/bad.json: /spec/") for line in refused.err.splitlines()] == [
        "bypass/0/headers: unknown key; did you mean header?",
        (
            "loop_detection/1/ignore_fields/0: it must be a JSON Pointer, such as '/metadata/request_id' or '/messages/*/id', "
            "not 'user'"
        ),
        "loop_detection/2/tail_messages: tail_messages must be >= 1, not 0",
        "loop_detection/3/max_cycle: max_cycle must be <= 16, not 99",
        "loop_detection/0/tail_messages: tail_messages belongs to similarity tail, not exact",
        (
            "bypass/0: needs at least one of header, pathExact, pathPrefix, methods, but has only headers; "
            "it would bypass everything"
        ),
    ]


# init, schema, healthcheck, help


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("interactive", ("exact", 3, 5, "throttle", "enforce")),
        ("agentic", ("exact", 2, 60, "reject", "enforce")),
        ("webhook", ("exact", 5, 10, "warn", "enforce")),
        ("canary", ("exact", 3, 60, "warn", "shadow")),
    ],
)
def test_init_prints_a_policy_to_start_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, preset: str, expected: tuple[object, ...]
) -> None:
    """Each preset is good as it stands, serve would start with it, and it says in words what it does."""
    made = Run(capsys, "init", "--preset", preset)
    file = tmp_path / "policy.json"
    file.write_text(made.out)

    checked = Run(capsys, "validate", "--strict", str(file))

    assert (made.code, made.err, checked.code, checked.err) == (0, "", 0, "")
    document = json.loads(made.out)
    ((name, loop),) = Policy.model_validate(document).spec.detectors()
    assert (document["id"], name) == (preset, "default")
    shown = (loop.similarity, loop.threshold_identical_requests, loop.window_seconds, loop.action, document["spec"]["mode"])
    assert shown == expected
    assert loop.escalate.list_steps() == []
    helped = re.sub(r"\s+", " ", Run(capsys, "init", "--help").out)
    assert f" {preset} {document['description']} " in helped


def test_init_prints_the_policy_for_agents(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Unless another one is asked for; a name that does not exist is told with those that do."""
    made = Run(capsys, "init")
    file = tmp_path / "agents.json"
    file.write_text(made.out)
    checked = Run(capsys, "validate", "--strict", str(file))
    assert (made.code, made.err, checked.code, checked.err) == (0, "", 0, "")
    assert made.out == Run(capsys, "init", "--preset", "agents").out
    spec = Policy.model_validate(json.loads(made.out)).spec
    shown = [
        (name, loop.similarity, loop.threshold_identical_requests, loop.window_seconds, loop.action, loop.escalate.list_steps())
        for name, loop in spec.detectors()
    ]
    assert shown == [
        ("turns", "turns", 3, None, "steer", [("land", 5), ("reject", 7)]),
        ("again", "prompt", 5, 60, "throttle", [("reject", 20)]),
    ]
    assert json.loads(made.out)["description"] in re.sub(r"\s+", " ", Run(capsys, "init", "--help").out)
    refused = Run(capsys, "init", "--preset", "agent")
    assert refused.code == 2
    assert "'agents', 'interactive', 'agentic', 'webhook', 'canary'" in refused.err


def test_init_prints_limits_of_sessions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of steps, calls and money, and of one tool by itself; with a last answer instead of an error when calls are used up."""
    made = Run(capsys, "init", "--preset", "sessions")
    file = tmp_path / "sessions.json"
    file.write_text(made.out)
    checked = Run(capsys, "validate", "--strict", str(file))

    assert (made.code, made.err, checked.code) == (0, "", 0)
    limits = Policy.model_validate(json.loads(made.out)).spec.session_limits
    assert limits is not None
    assert (limits.max_steps, limits.max_tool_calls, limits.max_cost_per_session) == (16, 50, 5.0)
    assert (limits.max_tool_calls_mode, limits.max_calls_per_tool) == ("finish", {"issue_refund": 1})


def test_schema_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The schema of policy files, and nothing else, stands on stdout."""
    run = Run(capsys, "schema")

    assert (run.code, run.err) == (0, "")
    assert json.loads(run.out) == make_schema()


def test_healthcheck_of_nothing(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Where nothing answers, the exit code is 1 and stderr says why in one line."""
    run = Run(capfd, "healthcheck", "--address", f"unix:{tmp_path}/none.sock", "--timeout", "5")

    assert (run.code, run.out) == (1, "")
    assert run.complaint.startswith("UNAVAILABLE: ")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` is the distribution's, and says how the hot path runs."""
    run = Run(capsys, "--version")

    assert run.code == 0
    assert re.fullmatch(
        rf"loopguard {re.escape(metadata.version('extproc-loopguard'))} \((compiled|pure Python; .*)\)\n", run.out
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """`--help` of every command shows how it is used, by examples that start with its own name."""
    run = Run(capsys, command, "--help")

    assert run.code == 0
    assert re.search(rf"^examples:\n  (LOOPGUARD_\S+ )?loopguard {command}\b", run.out, re.MULTILINE)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`loopguard --help` names each command with what it does."""
    run = Run(capsys, "--help")

    assert run.code == 0
    assert re.findall(r"^    (\S+)(?:  +\S|$)", run.out, re.MULTILINE) == list(COMMANDS)


# usage errors: exit 2 and one clear line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["sreve"], "argument COMMAND: invalid choice: 'sreve' (choose from "),
        (["serve", "--policy"], "argument --policy: expected one argument; see 'loopguard serve --help'"),
        (["serve", "--policy", "GOOD", "--listen", "here"], "--listen must be HOST:PORT or unix:/PATH, not 'here'"),
        (["serve", "--policy", "GOOD", "--admin", "unix:/x"], "--admin must be HOST:PORT, not 'unix:/x'"),
        (["serve", "--policy", "GOOD", "--store", "mongodb://h"], "unknown store mongodb"),
        (["serve", "--policy", "GOOD", "--store", "memory://?max_entries=0"], "cannot use store 'memory://?max_entries=0': "),
        (["serve", "--policy", "GOOD", "--max-streams", "0"], "--max-streams must be a positive integer, not '0'"),
        (["serve", "--policy", "GOOD", "--colour"], "unrecognized arguments: --colour; see 'loopguard serve --help'"),
        (["schema", "x"], "unrecognized arguments: x; see 'loopguard schema --help'"),
        (["grant", "--fingerprint", "aa"], "unrecognized arguments: --fingerprint aa; see 'loopguard grant --help'"),
        (["serve", "GOOD"], "unrecognized arguments: "),
        (["serve", "--policy", ""], "a policy path is empty; give a policy file or a directory of them"),
        (["validate", ""], "a policy path is empty; "),
        (["explain", "--policy", "", "h/"], "a policy path is empty; "),
        (["envoy-config", "--policy", "", "--upstream", "h:1"], "a policy path is empty; "),
        (["validate"], "the following arguments are required: PATH; see 'loopguard validate --help'"),
        (["explain", "h/"], "the following arguments are required: --policy; see 'loopguard explain --help'"),
        (["explain", "--policy", "GOOD"], "the following arguments are required: URL; see 'loopguard explain --help'"),
        (["explain", "--policy", "GOOD", "-H", "novalue", "h/"], "-H 'novalue' must be 'name: value'"),
        (["explain", "--policy", "GOOD", "--claim", "x", "h/"], "--claim 'x' must be NAME=VALUE"),
        (["explain", "--policy", "GOOD", "-d", "@/no/such", "h/"], "-d @/no/such: cannot be read: No such file or directory"),
        (["explain", "--policy", "GOOD", "http://[::1/"], "'http://[::1/' is not a URL: Invalid IPv6 URL"),
        (["explain", "--policy", "GOOD", "http://h:99999/"], "'http://h:99999/' is not a URL: Port out of range 0-65535"),
        (["explain", "--policy", "GOOD", "mailto:ann"], "'mailto:ann' is not a URL: "),
        (["explain", "--policy", "GOOD", "ftp://h/"], "'ftp://h/' is not a URL of http or https"),
        (["explain", "--policy", "GOOD", "://h/"], "'://h/' is not a URL of http or https"),
        (["explain", "--policy", "GOOD", ""], "'' is not a URL: it has no host"),
        (["explain", "--policy", "GOOD", "http:///a"], "'http:///a' is not a URL: it has no host"),
        (["explain", "--policy", "GOOD", "?q=1"], "'?q=1' is not a URL: it has no host"),
        (
            ["explain", "--policy", "GOOD", "http://h/a b"],
            "'http://h/a b' is not a URL: percent-encode spaces and control characters",
        ),
        (["explain", "--policy", "GOOD", "-X", "", "h/"], "-X '' must be an HTTP method such as POST"),
        (["explain", "--policy", "GOOD", "-X", "GET /", "h/"], "-X 'GET /' must be an HTTP method such as POST"),
        (["healthcheck", "--timeout", "soon"], "argument --timeout: invalid float value: 'soon'"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], good: str, arguments: list[str], line: str) -> None:
    """An invalid command line exits 2 with one line that names what is wrong and what would be right."""
    run = Run(capsys, *(good if argument == "GOOD" else argument for argument in arguments))

    assert run.code == 2
    assert run.complaint.startswith(f"loopguard: {line}")
