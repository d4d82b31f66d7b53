"""The `loopguard` command: what it prints, and its exit codes."""

import json
import re
from base64 import urlsafe_b64encode
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from extproc.cli.commands import COMMANDS
from extproc.detectors.tool_calls import NO_CALLS
from extproc.engine.engine import Engine
from extproc.policy.bundle import make_schema
from extproc.policy.loader import load
from tests.support import ROOT
from tests.support.budget_policies import REJECT, limited, rule
from tests.support.chart import CHART
from tests.support.command import GOOD, NOT_ENFORCED, WITH_RULES, Run, fits, written
from tests.support.documents import bundle, policy

# The code behind `explain` is compiled
pytestmark = [
    pytest.mark.usefixtures("_no_settings"),
    pytest.mark.compiled,
]


# validate


@pytest.mark.parametrize("way", ["flag", "variable"])
def test_allowed_unenforced_parts_are_warnings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    one = written(
        tmp_path / "one.json",
        bundle(WITH_RULES, kill_switches=[{"scope_key": "ip:asn", "scope_value": "64496"}]),
    )
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


def test_validate_checks_namespaces_and_overlaps(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, prefix in (("a", "/"), ("b", "/b")):
        (tmp_path / f"{name}.json").write_text(
            json.dumps(policy(f"{name}-p", {"pathPrefix": prefix}, limit_keys=["jwt:org"]))
        )
    paths = [f"{tmp_path}/a.json", f"{tmp_path}/b.json"]
    named = f"a-p ({paths[0]}) and b-p ({paths[1]})"
    runs = [Run(capsys, "validate", *flags, *paths) for flags in ([], ["--strict"])]
    good = Run(capsys, "validate", "--namespace-of", f"{paths[1]}=path:/b", *paths)
    bad = Run(
        capsys,
        "validate",
        "--namespace-of",
        f"{paths[0]}=path:/a",
        "--namespace-of",
        f"{paths[1]}=path:/b",
        *paths,
    )
    misspelt = Run(capsys, "validate", "--namespace-of", "teams/b=path:/b", *paths)

    assert [(run.code, named in run.err) for run in runs] == [(0, False), (0, True)]
    assert (good.code, bad.code, misspelt.code) == (0, 1, 2)
    assert f"{paths[0]}: /spec/selector: must name a path, and only paths below /a" in bad.err


def test_validate_notes_the_meaning_of_defaults(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    silent = [
        policy(name, {"pathExact": "/b"}, limit_keys=["jwt:org_id"]) for name in ("q", "r", "s")
    ]
    told = [
        policy(name, {"pathExact": "/b"}, limit_keys=["jwt:a"], missing_descriptor=name)
        for name in ("share", "skip")
    ]
    always = policy(
        "t", {"pathExact": "/b"}, limit_keys=["header:Host", "jwt:org_id", "ip:address"]
    )
    moot = policy("u", {"pathExact": "/b"}, limit_keys=["ip:address"])
    file = written(tmp_path / "p.json", bundle(*silent, *told, always, moot))

    run = Run(capsys, "validate", "--strict", file)

    assert (run.code, run.out) == (0, "good: 7 policies in 1 file\n")
    uncounted = "requests with none of the limit keys are not counted (default: require_one)"
    shared = "with share, they share one count"
    alone = "so requests without the other limit keys are counted by that alone"
    assert run.err.splitlines() == [
        (
            f"note: {file}: /policies/0/spec: missing_descriptor is not set: {uncounted}; {shared} "
            "(and 2 more)"
        ),
        (
            f"note: {file}: /policies/5/spec/limit_keys: every request has header:host and "
            f"ip:address, {alone}"
        ),
    ]


# explain


def explain(
    capsys: pytest.CaptureFixture[str], folder: Path, document: object, *flags: str
) -> list[dict[str, str]]:
    """The rows of each block; a line without a name continues the row above."""
    run = Run(capsys, "explain", "--policy", written(folder / "explained.json", document), *flags)
    assert run.code == 0, run.err
    blocks = []
    for block in run.out.strip().split("\n\n"):
        rows: dict[str, str] = {}
        for line in block.splitlines():
            name = line[:12].strip() or next(reversed(rows))
            rows[name] = f"{rows[name]}\n{line[13:]}" if name in rows else line[13:]
        blocks.append(rows)
    return blocks


def test_explain_shows_composite_and_fingerprint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    body = '{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
    flags = [
        "--claim",
        "org_id=org-abc",
        "--claim",
        "user_id=user-1",
        "-d",
        body,
        "https://api.example.com/v1/chat/completions",
    ]

    (found,) = explain(capsys, tmp_path, GOOD, *flags)

    composite = (
        f"POST|/v1/chat/completions||{crc32(body.encode()):08x}|org_id=org-abc|user_id=user-1"
    )
    fingerprint = f"{crc32(composite.encode()):08x}"
    assert (found["policy"], found["composite"], found["fingerprint"]) == (
        "p (enforce)",
        composite,
        fingerprint,
    )
    assert re.fullmatch(
        rf"loop:p:default:sliding_ttl::{found['tenant']}:{fingerprint}[0-9a-f]{{16}}", found["key"]
    )
    assert found["decision"] == (
        "allow 2 identical requests, then reject with 429 (Retry-After: 60); window "
        "sliding_ttl, 60 s"
    )


def test_explain_reads_a_body_from_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    body = b"\xff\r\n"
    file = written(tmp_path / "body", body)

    (found,) = explain(
        capsys, tmp_path, GOOD, "--claim", "org_id=o", "-d", f"@{file}", "h/v1/chat/completions"
    )

    assert found["composite"] == f"POST|/v1/chat/completions||{crc32(body):08x}|org_id=o"


TOKEN = (
    "authorization: Bearer e30." + urlsafe_b64encode(b'{"org_id": "o"}').decode().rstrip("=") + ".x"
)


@pytest.mark.parametrize(
    ("limit_key", "flags", "url", "composite"),
    [
        ("jwt:org_id", [], "h/a", "GET|/a||00000000"),
        ("jwt:org_id", ["-H", TOKEN], "h/a", "GET|/a||00000000"),
        ("jwt:org_id", ["-H", TOKEN, "--allow-unverified-jwt"], "h/a", "GET|/a||00000000|org_id=o"),
        (
            "header:x-user",
            ["-H", "X-User:  ann ", "-H", "x-user: bob"],
            "h/a",
            "GET|/a||00000000|x-user=ann",
        ),
        (
            "header:host",
            ["-H", "Host: other:1"],
            "http://u@h:80/a",
            "GET|/a||00000000|host=other:1",
        ),
        ("header:host", [], "http://u@h:80/a", "GET|/a||00000000|host=h:80"),
        (
            "query:q",
            ["-X", "PUT"],
            "http://h/a?z=1&q=a+b%7C&q=2#f",
            "PUT|/a|q=2&q=a b%7C&z=1|00000000|q=a b%7C",
        ),
        ("ip:address", ["--address", "2001:db8::1"], "h/a", "GET|/a||00000000|address=2001:db8::1"),
        ("ip:address", ["-d", "", "-X", "DELETE"], "/a", "DELETE|/a||00000000|address=127.0.0.1"),
        (
            "ip:address",
            ["-d", "x"],
            "h/a\udcff",
            f"POST|/a\\udcff||{crc32(b'x'):08x}|address=127.0.0.1",
        ),
    ],
)
def test_explain_takes_requests_like_curl(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    limit_key: str,
    flags: list[str],
    url: str,
    composite: str,
) -> None:
    document = policy("p", {"pathPrefix": "/"}, limit_keys=[limit_key], missing_descriptor="share")

    (found,) = explain(capsys, tmp_path, document, *flags, url)

    assert found["composite"] == composite


ANY = {"pathPrefix": "/"}
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


def looking(*names: str, **more: object) -> dict[str, Any]:
    made = policy("p", ANY)
    made["spec"] |= {
        "loop_detection": [made["spec"]["loop_detection"] | LOOPS[name] for name in names],
        **more,
    }
    return made


def anywhere(**more: Any) -> dict[str, Any]:  # noqa: ANN401  # any field of a policy
    return policy("p", ANY, **more)


def called(times: int) -> str:
    """A conversation in which a tool was called this many times alike."""
    call = {"id": "c", "function": {"name": "read_file", "arguments": '{"b": 1.0, "a": "X"}'}}
    turn = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "No such file"},
    ]
    return json.dumps(
        {
            "user": "ann",
            "model": "m",
            "messages": [{"role": "user", "content": "Go  ON"}, *turn * times],
        }
    )


CALL = 'read_file | {"a":"X","b":1}'


def steered(turns: int, result: str | None = "pending") -> list[str]:
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"}}
    turn = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": result},
    ]
    return [
        "-d",
        json.dumps({"messages": [{"role": "user", "content": "go"}, *turn * turns]}),
        "h/v1/chat/completions",
    ]


STEER: dict[str, Any] = {"similarity": "turns", "action": "steer"}
RAMPED: dict[str, Any] = {
    "enforce_percent": 25,
    "limit_keys": ["ip:address"],
    "ramp_by": ["header:x-user"],
}
RAMP_OUT = "out, so in shadow mode: "
POSTS = {"pathPrefix": "/v1/", "methods": ["POST"]}
NO_CLAIM = "jwt:org_id: no claim of that name was verified; give --claim org_id=VALUE"
ORG_OR_USER = anywhere(limit_keys=["jwt:org_id", "header:x-user"])
BODILESS = [anywhere(), anywhere(body="ignore") | {"id": "i"}]
Rows = dict[str, str | None]
UNKNOWN_BODY: Rows = {"composite": "…|/a||00000000"}
PLAN = limited(
    rule(
        "cost_based",
        "a",
        more={"match": {"header:x-plan": "free"}},
        budget=9,
        period="1d",
        staged_actions=[{"threshold_percent": 80, "action": "warn"}, *REJECT],
    )
)
KEYED_BODY = looking("exact", "tail", limit_keys=["body:/user", "body:/metadata/n"])
FORGED = {
    "user": "ann\nfingerprint  00000000",
    "metadata": {"n": 7},
    "messages": [{"role": "user", "content": "a\nb"}],
}
NOTHING = "allow: no call of the last turn, or fewer calls than any threshold"
CALLED_TWICE = "allow below 3 identical calls, then reject with 429; read_file: 2 of 2 calls"
CALLED_THRICE = "reject with 429; read_file: 3 of 3 calls"
THEN = "allow 2 identical requests, then "
EXPLAINED: dict[
    str, tuple[object, list[str], list[Rows]]
] = {  # policies, flags, and some of the rows of each block
    "warn": (anywhere(action="warn"), ["h/"], [{"decision": f"{THEN}warn; …", "key": "loop:…"}]),
    "throttle": (
        anywhere(action="throttle"),
        ["h/"],
        [{"decision": f"{THEN}throttle (hold 300 ms at first); …"}],
    ),
    "another status": (
        anywhere(cooldown_seconds=90, reject_status=503),
        ["h/"],
        [{"decision": f"{THEN}reject with 503 (Retry-After: 90); …"}],
    ),
    "an answer": (
        anywhere(refuse_as="completion"),
        ["h/"],
        [
            {
                "decision": (
                    f"{THEN}reject with an answer of the API, or if that is unknown with 429 (R…"
                )
            }
        ],
    ),
    "a status by client": (
        anywhere(reject_status="auto"),
        ["h/"],
        [{"decision": f"{THEN}reject with 429, or 400 for clients that retry that (Retry-…"}],
    ),
    "back to back": (
        anywhere(window_type="back_to_back", window_seconds=2, cooldown_seconds=90),
        ["h/"],
        [
            {
                "decision": (
                    f"{THEN}reject with 429 (Retry-After: 90); window back_to_back, 2 s; the body "
                    "has neither tools nor a turn of the assistant, so it is refused from 256 on"
                )
            }
        ],
    ),
    "in place of back to back": (
        anywhere(window_type="sliding_log", only_without_entries=True),
        ["h/"],
        [{"decision": "…window sliding_log, 60 s, while no access log entries arrive"}],
    ),
    "shadow": (
        anywhere(mode="shadow", window_type="fixed"),
        ["h/"],
        [
            {
                "decision": (
                    "…then report: would reject with 429 (Retry-After: 60); window fixed, 60 s"
                ),
                "key": "shadow:loop:…",
            }
        ],
    ),
    "a note": (
        anywhere(**STEER),
        steered(3),
        [
            {
                "note": (
                    "Loop detected: 3 of the last 3 turns were f with the same input and the "
                    "same result.…"
                ),
                "unsteered": None,
            }
        ],
    ),
    "no place for a note": (
        anywhere(**STEER),
        steered(3, None),
        [{"note": None, "unsteered": "let through with a warning: no_result…"}],
    ),
    "no turn": (
        anywhere(**STEER),
        steered(0),
        [{"decision": "allow…", "note": None, "unsteered": None}],
    ),
    "no loop yet": (
        anywhere(**STEER),
        steered(2),
        [{"decision": "allow…", "note": None, "unsteered": None}],
    ),
    "a permitted tool": (
        anywhere(**STEER, tools={"f": {"allow": True}}),
        steered(3),
        [{"decision": "allow…", "note": None, "unsteered": None}],
    ),
    "refused already": (
        anywhere(**STEER, escalate={"reject": 4}),
        steered(4),
        [{"decision": "reject…", "note": None, "unsteered": None}],
    ),
    "in a share": (
        anywhere(**RAMPED),
        ["-H", "x-user: carl", "h/a"],
        [
            {
                "policy": "p (enforce)",
                "ramp": (
                    "in: place 4 of 100 by header:x-user (seed p); the policy acts on places "
                    "1 to 25"
                ),
                "missing": None,
                "key": "loop:p:…",
            }
        ],
    ),
    "in a share that keeps its counts": (
        anywhere(**RAMPED, keep_counts=True),
        ["-H", "x-user: carl", "h/a"],
        [{"key": "shadow:loop:p:…"}],
    ),
    "out of a share": (
        anywhere(**RAMPED),
        ["-H", "x-user: ann", "h/a"],
        [
            {
                "policy": "p (shadow)",
                "ramp": (
                    f"{RAMP_OUT}place 29 of 100 by header:x-user (seed p); the policy acts on "
                    "places 1 to 25"
                ),
                "key": "shadow:loop:p:…",
            }
        ],
    ),
    "out of a share by no name": (
        anywhere(**RAMPED),
        ["h/a"],
        [
            {
                "policy": "p (shadow)",
                "ramp": f"{RAMP_OUT}the request has no header:x-user",
                "missing": "header:x-user",
            }
        ],
    ),
    "no claim": (
        [anywhere(limit_keys=["jwt:org_id"], missing_descriptor="skip")],
        ["h/a"],
        [
            {
                "policy": "p",
                "missing": NO_CLAIM,
                "uncounted": "missing_descriptor",
                "composite": None,
            }
        ],
    ),
    "no key": (
        ORG_OR_USER,
        ["h/a"],
        [{"missing": f"{NO_CLAIM}\nheader:x-user", "composite": None, "uncounted": "…"}],
    ),
    "a token that is not verified": (
        ORG_OR_USER,
        ["-H", TOKEN, "h/a"],
        [
            {
                "missing": (
                    "jwt:org_id: authorization: Bearer is given, but not verified; see "
                    "--claim…\nheader:x-user"
                ),
                "composite": None,
            }
        ],
    ),
    "one key of two": (
        ORG_OR_USER,
        ["-H", "x-user: ann", "h/a"],
        [{"missing": "jwt:org_id…", "composite": "…", "uncounted": None}],
    ),
    "both keys": (
        ORG_OR_USER,
        ["-H", "x-user: ann", "--claim", "org_id=o", "h/a"],
        [{"missing": None, "composite": "…", "uncounted": None}],
    ),
    "gRPC": (
        BODILESS,
        ["-H", "content-type: application/grpc+proto", "-H", "te: trailers", "-d", "x", "h/a"],
        [{"policy": "p", "uncounted": "grpc", "composite": None}, UNKNOWN_BODY],
    ),
    "an upgrade": (
        BODILESS,
        ["-H", "connection: upgrade", "-H", "Upgrade: websocket", "h/a"],
        [{"uncounted": "upgrade", "composite": None}, UNKNOWN_BODY],
    ),
    "CONNECT": (
        BODILESS,
        ["-X", "CONNECT", "h/a"],
        [{"uncounted": "connect", "composite": None}, UNKNOWN_BODY],
    ),
    "a websocket for model calls": (
        [policy("p", POSTS), policy("s", POSTS, body="ignore", mode="shadow")],
        ["-H", "Upgrade: websocket", "h/v1/responses"],
        [
            {"policy": "p", "decision": "reject with 426", "uncounted": "responses_websocket"},
            {"policy": "s", "decision": None, "uncounted": "responses_websocket"},
        ],
    ),
    "a loop of calls": (
        looking("tool_calls", "cool"),
        ["-d", called(3), "h/v1"],
        [
            {"decision": CALLED_THRICE, "key": None},
            {
                "decision": CALLED_THRICE,
                "key": "loop:p:cool:fixed::…",
                "message": "…3 of the last 3 tool calls were read_file…",
            },
        ],
    ),
    "calls before a loop": (
        looking("tool_calls", "cool"),
        ["-d", called(2), "h/v1"],
        [{"decision": NOTHING}, {"decision": CALLED_TWICE, "message": None}],
    ),
    "no calls": (
        looking("tool_calls", "cool"),
        ["-d", called(0), "h/v1"],
        [{"decision": NOTHING, "compared": NO_CALLS}] * 2,
    ),
    "the hold of a loop of calls": (
        anywhere(
            cooldown_seconds=9,
            similarity="tool_calls",
            action="throttle",
            threshold_identical_requests=4,
        ),
        ["-d", called(3), "h/v1"],
        [
            {
                "decision": (
                    "allow below 4 identical calls, then throttle (hold 400 ms at first); "
                    "read_file: 3 of 3 calls"
                )
            }
        ],
    ),
    "a session": (
        anywhere(similarity="turns", session={}),
        ["-d", called(1), "h/v1", "-H", "session-id: s"],
        [
            {
                "ring": "ring:p:default::…: earlier turns, which explain does not read",
                "decision": "allow: the newest turn is not part of a loop",
            }
        ],
    ),
    "no session": (
        anywhere(similarity="turns", session={}),
        ["-d", called(1), "h/v1"],
        [{"ring": None, "decision": "allow: the newest turn is not part of a loop"}],
    ),
    "no rule": (
        PLAN,
        ["http://h/"],
        [{"rule": "a: its match does not hold", "decision": "allow: no rule applies"}],
    ),
    "a rule without its key": (
        PLAN,
        ["-H", "x-plan: free", "http://h/"],
        [{"rule": "a: a limit key is missing", "missing": "header:x-api-key"}],
    ),
    "a rule": (
        PLAN,
        ["-H", "x-plan: free", "-H", "x-api-key: k", "http://h/"],
        [{"budget": "a: 9 in a day", "stage": "warn from 80 % on"}],
    ),
    "a single detector that compares bytes": (
        anywhere(),
        ["-d", called(0), "h/v1"],
        [{"detector": None}],
    ),
    "a single detector that looks": (
        anywhere(similarity="tail"),
        ["-d", called(0), "h/v1"],
        [
            {
                "policy": "p (enforce)",
                "detector": "default (tail)",
                "compared": "model | m\nuser | text | go on",
                "tenant": "e4a6a0577479b2b4",
                "decision": f"{THEN}reject with 429 (Retry-After: 60); window sliding_ttl, 60 s",
            }
        ],
    ),
    "a detector that cannot look": (
        looking("exact", "tail"),
        ["-d", "a=1", "h/v1"],
        [{"detector": "tail", "uncounted": "not_json"}, {"detector": "exact (exact)"}],
    ),
    "a caller in the body": (
        KEYED_BODY,
        ["-d", json.dumps(FORGED), "h/v1"],
        [
            {"composite": r"…|/metadata/n=7|/user=ann\nfingerprint  00000000"},
            {
                "composite": r"…|/metadata/n=7|/user=ann\nfingerprint  00000000",
                "compared": "model | \nuser | text | a b",
            },
        ],
    ),
    "a body that is not JSON": (
        looking("canonical"),
        ["-d", "a=1", "h/v1"],
        [{"compared": "the body byte for byte: it is not JSON"}],
    ),
}


@pytest.mark.parametrize(("document", "flags", "expected"), EXPLAINED.values(), ids=EXPLAINED)
def test_explain_shows_the_decision_and_why(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    document: object,
    flags: list[str],
    expected: list[Rows],
) -> None:
    blocks = explain(capsys, tmp_path, document, *flags)

    for rows, wanted in zip(blocks, expected, strict=True):
        assert {name: fits(rows.get(name), text) for name, text in wanted.items()} == dict.fromkeys(
            wanted, True
        ), rows


def test_explain_says_that_no_policy_matches(capsys: pytest.CaptureFixture[str], good: str) -> None:
    run = Run(capsys, "explain", "--policy", good, "h/b")

    assert (run.code, run.out) == (0, "no policy matches GET /b: the request passes uncounted\n")


@pytest.mark.parametrize("times", [2, 3])
def test_explain_shows_what_each_detector_compares(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, times: int
) -> None:
    body = called(times)

    found = explain(capsys, tmp_path, looking(*LOOPS), "-d", body, "h/v1")

    decoded = json.loads(body)
    del decoded["user"]
    assert [(rows["detector"], rows.get("compared")) for rows in found] == [
        ("exact (exact)", None),
        ("canonical (canonical)", json.dumps(decoded, sort_keys=True, separators=(",", ":"))),
        ("tail (tail)", f"model | m\nassistant | call | {CALL}\ntool | result | no such file"),
        ("tool_calls (tool_calls)", "\n".join([f"{CALL} | result | No such file"] * times)),
        ("cool (tool_calls)", "\n".join([CALL] * times)),
    ]
    assert found[0]["composite"] == f"POST|/v1||{crc32(body.encode()):08x}"


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
    more: dict[str, Any] = {
        "limit_keys": ["body:/user"],
        "missing_descriptor": "share",
        "bypass": [{"header": "x-health"}],
    }

    found = explain(capsys, tmp_path, looking(*LOOPS, **more), *flags, "h/v1")

    assert [rows["uncounted"] for rows in found if "uncounted" in rows] == reasons
    assert sum("decision" in rows for rows in found) == (
        0 if reasons == ["bypass"] else len(LOOPS) - len(reasons)
    )


# init, schema, healthcheck, help


def exact(threshold: int, seconds: int, action: str) -> list[dict[str, Any]]:
    window = {"window_seconds": seconds, "window_type": "sliding_log"}
    return [{"threshold_identical_requests": threshold, "action": action, **window}]


TURNS = {
    "name": "turns",
    "similarity": "turns",
    "threshold_identical_requests": 3,
    "weak_threshold": 14,
    "action": "steer",
}
AGAIN = {
    "name": "again",
    "similarity": "prompt",
    "escalate": {"reject": 20},
    **exact(5, 60, "throttle")[0],
}
PRESETS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "agents": ("enforce", [{**TURNS, "escalate": {"land": 5, "reject": 7}}, AGAIN]),
    "interactive": ("enforce", exact(3, 5, "throttle")),
    "agentic": ("enforce", exact(2, 60, "reject")),
    "webhook": ("enforce", exact(5, 10, "warn")),
    "canary": ("shadow", exact(3, 60, "warn")),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_init_prints_each_preset_with_its_description(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, preset: str
) -> None:
    made = Run(capsys, "init", "--preset", preset)
    checked = Run(
        capsys, "validate", "--strict", written(tmp_path / "policy.json", made.out.encode())
    )

    assert (made.code, made.err, checked.code, checked.err) == (0, "", 0, "")
    document = json.loads(made.out)
    loops = document["spec"]["loop_detection"]
    for loop in loops if isinstance(loops, list) else [loops]:
        assert loop.pop("enabled")
        loop.pop("reject_status", None)
        loop.pop("count_failed", None)
    mode, expected = PRESETS[preset]
    assert (document["id"], document["spec"]["mode"]) == (preset, mode)
    assert (loops if isinstance(loops, list) else [loops]) == expected
    assert f" {preset} {document['description']} " in re.sub(
        r"\s+", " ", Run(capsys, "init", "--help").out
    )


def test_init_prints_agents_and_session_limits_in_shadow(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    agents, preset = [
        json.loads(Run(capsys, "init", "--preset", name).out) for name in ("agents", "sessions")
    ]
    made = Run(capsys, "init")
    file = written(tmp_path / "agents.json", made.out.encode())
    checked = Run(capsys, "validate", "--strict", file)

    first, second = json.loads(made.out)
    assert (made.code, made.err, checked.code) == (0, "", 0)
    assert first == agents
    limits = {**preset["spec"]["session_limits"]}
    del limits["max_calls_per_tool"]
    assert (second["spec"]["mode"], second["spec"]["session_limits"]) == ("shadow", limits)
    (pairing,) = Engine(load([file], now := datetime.now(UTC)), now).pairings
    assert (pairing.live, pairing.candidate) == ("agents", "sessions")


def test_init_takes_limits_from_transcripts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    transcripts = str(ROOT / "examples" / "transcripts")
    scanned = json.loads(Run(capsys, "scan", "--json", transcripts).out)["limits"]
    made = Run(capsys, "init", "--from-scan", transcripts)
    file = written(tmp_path / "agents.json", made.out.encode())
    checked = Run(capsys, "validate", "--strict", file)
    nothing = Run(capsys, "init", "--from-scan", str(tmp_path))
    both = Run(capsys, "init", "--preset", "agents", "--from-scan")

    limits = json.loads(made.out)[1]["spec"]["session_limits"]
    assert (made.code, checked.code) == (0, 0)
    assert "limits from 7 of 11 sessions, those without a loop" in made.err
    assert limits == limits | scanned["session_limits"]
    assert limits["max_calls_per_tool"].keys() >= {"Bash"}
    assert (nothing.code, nothing.out) == (1, "")
    assert "nothing to scan in" in nothing.err
    assert (both.code, "--from-scan does not go with --preset" in both.err) == (2, True)


def test_init_prints_session_limits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = Run(capsys, "init", "--preset", "sessions")
    checked = Run(
        capsys, "validate", "--strict", written(tmp_path / "sessions.json", made.out.encode())
    )

    assert (made.code, made.err, checked.code) == (0, "", 0)
    assert json.loads(made.out)["spec"]["session_limits"] == {
        "max_steps": 16,
        "max_tool_calls": 50,
        "max_tool_calls_mode": "finish",
        "max_calls_per_tool": {"issue_refund": 1},
        "max_cost_per_session": 5.0,
        "max_agents": 200,
        "max_concurrent_agents": 100,
        "max_spawns_per_minute": 60,
        "unknown_model": {"input": 15, "output": 75},
        "reject_status": "auto",
    }


def test_schema_prints_only_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, "schema")

    assert (run.code, run.err) == (0, "")
    assert json.loads(run.out) == make_schema()


def test_healthcheck_without_server_fails(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = Run(capfd, "healthcheck", "--address", f"unix:{tmp_path}/none.sock", "--timeout", "5")

    assert (run.code, run.out) == (1, "")
    assert run.complaint.startswith("UNAVAILABLE: ")


def test_version_says_how_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, "--version")

    assert run.code == 0
    assert re.fullmatch(
        (
            rf"loopguard {re.escape(metadata.version('extproc-loopguard'))} \((compiled|pure "
            r"Python; "
            r".*)\)\n"
        ),
        run.out,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_examples(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    run = Run(capsys, command, "--help")

    assert run.code == 0
    assert re.search(
        rf"^examples:\n  (LOOPGUARD_\S+ )?loopguard {command}\b", run.out, re.MULTILINE
    )
    assert re.search(rf"^    {command}(?:  +\S|$)", Run(capsys, "--help").out, re.MULTILINE)


# usage errors: exit 2 and one clear line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["sreve"], "argument COMMAND: invalid choice: 'sreve' (choose from …"),
        (
            ["serve", "--policy"],
            "argument --policy: expected one argument; see 'loopguard serve --help'",
        ),
        (
            ["serve", "--policy", "GOOD", "--listen", "here"],
            "--listen must be HOST:PORT or unix:/PATH, not 'here'",
        ),
        (
            ["serve", "--policy", "GOOD", "--admin", "unix:/x"],
            "--admin must be HOST:PORT, not 'unix:/x'",
        ),
        (["serve", "--policy", "GOOD", "--store", "mongodb://h"], "unknown store mongodb…"),
        (
            ["serve", "--policy", "GOOD", "--store", "memory://?max_entries=0"],
            "cannot use store 'memory://?max_entries=0': …",
        ),
        (
            ["serve", "--policy", "GOOD", "--max-streams", "0"],
            "--max-streams must be a positive integer, not '0'",
        ),
        (
            ["serve", "--policy", "GOOD", "--colour"],
            "unrecognized arguments: --colour; see 'loopguard serve --help'",
        ),
        (["schema", "x"], "unrecognized arguments: x; see 'loopguard schema --help'"),
        (
            ["grant", "--fingerprint", "aa"],
            "unrecognized arguments: --fingerprint aa; see 'loopguard grant --help'",
        ),
        (["serve", "GOOD"], "unrecognized arguments: …"),
        (
            ["serve", "--policy", ""],
            "a policy path is empty; give a policy file or a directory of them",
        ),
        (["validate", ""], "a policy path is empty; …"),
        (["explain", "--policy", "", "h/"], "a policy path is empty; …"),
        (["envoy-config", "--policy", "", "--upstream", "h:1"], "a policy path is empty; …"),
        (
            ["validate"],
            "the following arguments are required: PATH; see 'loopguard validate --help'",
        ),
        (
            ["explain", "h/"],
            "the following arguments are required: --policy; see 'loopguard explain --help'",
        ),
        (
            ["explain", "--policy", "GOOD"],
            "the following arguments are required: URL; see 'loopguard explain --help'",
        ),
        (
            ["explain", "--policy", "GOOD", "-H", "novalue", "h/"],
            "-H must be 'NAME: VALUE', not 'novalue'",
        ),
        (["explain", "--policy", "GOOD", "--claim", "x", "h/"], "--claim 'x' must be NAME=VALUE"),
        (
            ["explain", "--policy", "GOOD", "-d", "@/no/such", "h/"],
            "-d @/no/such: cannot be read: No such file or directory",
        ),
        (
            ["explain", "--policy", "GOOD", "http://[::1/"],
            "'http://[::1/' is not a URL: Invalid IPv6 URL",
        ),
        (
            ["explain", "--policy", "GOOD", "http://h:99999/"],
            "'http://h:99999/' is not a URL: Port out of range 0-65535",
        ),
        (["explain", "--policy", "GOOD", "mailto:ann"], "'mailto:ann' is not a URL: …"),
        (["explain", "--policy", "GOOD", "ftp://h/"], "'ftp://h/' is not a URL of http or https"),
        (["explain", "--policy", "GOOD", "://h/"], "'://h/' is not a URL of http or https"),
        (["explain", "--policy", "GOOD", ""], "'' is not a URL: it has no host"),
        (["explain", "--policy", "GOOD", "http:///a"], "'http:///a' is not a URL: it has no host"),
        (["explain", "--policy", "GOOD", "?q=1"], "'?q=1' is not a URL: it has no host"),
        (
            ["explain", "--policy", "GOOD", "http://h/a b"],
            "'http://h/a b' is not a URL: percent-encode spaces and control characters",
        ),
        (
            ["explain", "--policy", "GOOD", "-X", "", "h/"],
            "-X '' must be an HTTP method such as POST",
        ),
        (
            ["explain", "--policy", "GOOD", "-X", "GET /", "h/"],
            "-X 'GET /' must be an HTTP method such as POST",
        ),
        (
            ["healthcheck", "--timeout", "soon"],
            "argument --timeout: invalid float value: 'soon'; see …",
        ),
        (["envoy-config", "--policy", "GOOD"], "…--upstream…"),
        (["tpo"], "argument …; did you mean top?; see 'loopguard --help'"),
        (["check-envoi"], "argument …; did you mean check-envoy?; see 'loopguard --help'"),
        (["canary", "statsu"], "argument …; did you mean status?; see 'loopguard canary --help'"),
        (["top", "--sort", "costs"], "argument …; did you mean cost?; see 'loopguard top --help'"),
        (
            ["init", "--preset", "agent"],
            "argument …; did you mean agents?; see 'loopguard init --help'",
        ),
        (
            ["top", "--pollicy", "p"],
            "unrecognized arguments: --pollicy; did you mean --policy?; see 'loopguard top --help'",
        ),
        (
            ["top", "--polcy=p"],
            "unrecognized arguments: --polcy; did you mean --policy?; see 'loopguard top --help'",
        ),
        (
            ["explain", "--polcy", "p.json", "h/"],
            (
                "unrecognized arguments: --polcy; did you mean --policy?; see 'loopguard explain "
                "--help'"
            ),
        ),
        (
            ["canary", "status", "--polcy", "p"],
            (
                "unrecognized arguments: --polcy; did you mean --policy?; see 'loopguard canary "
                "--help'"
            ),
        ),
        (
            ["--versoin"],
            "unrecognized arguments: --versoin; did you mean --version?; see 'loopguard --help'",
        ),
    ],
)
def test_usage_error_is_one_line(
    capsys: pytest.CaptureFixture[str], good: str, arguments: list[str], line: str
) -> None:
    run = Run(capsys, *(good if argument == "GOOD" else argument for argument in arguments))

    assert (run.code, run.out) == (2, "")
    assert fits(run.complaint, f"loopguard: {line}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["top", "--frobnicate"],
        ["explain", "h/"],
        ["top", "--sort", "frobnicate"],
        ["schema", "--", "--sort"],
    ],
)
def test_unsimilar_words_get_no_suggestion(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert "did you mean" not in Run(capsys, *arguments).complaint


@pytest.mark.parametrize(
    ("arguments", "shown"), [([], "usage: loopguard "), (["canary"], "usage: loopguard canary ")]
)
def test_group_of_commands_prints_its_help(
    capsys: pytest.CaptureFixture[str], arguments: list[str], shown: str
) -> None:
    run = Run(capsys, *arguments)

    assert (run.code, run.err, run.out.startswith(shown), "--help" in run.out) == (
        0,
        "",
        True,
        True,
    )


def test_dashboards_writes_what_the_chart_installs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a" / "b"

    run = Run(capsys, "dashboards", str(folder))

    installed = {
        path.name: path.read_bytes()
        for path in (*CHART.glob("dashboards/*"), *CHART.glob("alerts/*"))
    }
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert (run.code, sorted(run.out.splitlines())) == (0, sorted(map(str, folder.iterdir())))
    assert b"slack_configs" in written.pop("alertmanager.yaml")
    assert written == installed


def test_changed_file_is_only_replaced_with_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = tmp_path / next(CHART.glob("alerts/*")).name
    rules.write_text("mine")

    refused, left = Run(capsys, "dashboards", str(tmp_path)), list(tmp_path.iterdir())
    again = [Run(capsys, "dashboards", *flags, str(tmp_path)).code for flags in (["--force"], [])]

    assert (refused.code, refused.complaint) == (
        2,
        f"loopguard: {rules}: exists with other content; --force replaces it",
    )
    assert (left, again) == ([rules], [0, 0])
    assert "LoopguardLoopSurge" in rules.read_text()


def test_folder_that_is_a_file_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "file").write_text("")

    run = Run(capsys, "dashboards", str(file))

    assert (run.code, run.complaint) == (2, f"loopguard: {file}: File exists")
