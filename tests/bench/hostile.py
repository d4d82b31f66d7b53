"""Hostile requests: each message delays all other requests while the guard inspects it."""

import json
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from contextlib import closing
from multiprocessing import get_context
from multiprocessing.pool import Pool
from statistics import median
from time import thread_time
from typing import Any

from extproc.ext_proc.service import Service
from extproc.ext_proc.stream import Stream
from extproc.request.notes import CLOSING, END, OPENING
from extproc.server import freeze_objects
from extproc.settings import Settings
from tests.bench import edits, samples
from tests.bench.report import Row, progress

TITLE = "hostile: the longest time that one message blocks the event loop"

_LIMIT_MS = 50
_EDIT_LIMIT_MS = 20
_READER_LIMIT_MS = 20
_SELECTORS: tuple[dict[str, Any], ...] = (
    {"pathExact": samples.PATH, "methods": ["POST"]},
    {"pathPrefix": "/"},
    {"pathPrefix": "/a/b/c/d/e/f/g/h/i/j"},
)
_LOOKING: Mapping[str, Mapping[str, object]] = {
    "exact": {},
    "canonical": {"ignore_fields": ["/messages/*/id", "/model/*/0"]},
    "tail": {},
    "tool_calls": {"window_calls": 200, "max_cycle": 16},
}
# On a server of its own: alone, a policy needs no other detectors' work.
_TURNS: Mapping[str, object] = {"similarity": "turns", "max_cycle": 16, "cooldown_seconds": 60}

# Readers of bodies, each alone in a policy.
READERS: Mapping[str, Mapping[str, object]] = {
    "budgets": {
        "rules": [
            {
                "name": "r",
                "limit_keys": ["header:x-user-id"],
                "algorithm": "token_bucket_llm",
                "algorithm_config": {"tokens_per_minute": 1_000_000_000},
            }
        ]
    },
    "session limits": {"session_limits": {"max_steps": 9_000, "max_tool_calls": 9_000}},
    **{
        name: {
            "loop_detection": {
                "enabled": True,
                "window_seconds": 60,
                "similarity": name,
                "threshold_identical_requests": 8,
            }
        }
        for name in ("canonical", "tail", "tool_calls", "turns", "prompt", "mcp")
    },
    "steering notes": {
        "session": {},
        "loop_detection": {
            "enabled": True,
            "similarity": "turns",
            "threshold_identical_requests": 3,
            "action": "steer",
            "escalate": {"land": 5, "reject": 7},
        },
    },
}

_KEYS = ["header:x-user-id", "query:page", "jwt:org_id", "ip:address"]


def _cases() -> Mapping[str, Sequence[bytes]]:
    path = samples.PATH
    pairs = "&".join(f"{number % 100}=%41" for number in range(10_000))
    headers = {
        "10 MB in one header": samples.headers_message(more={"x-big": "v" * 10_000_000}),
        "10 MB in 100,000 headers": samples.headers_message(
            more={f"x-{n:06d}": "v" * 80 for n in range(100_000)}
        ),
        "10 MB path": samples.headers_message("/a" * 5_000_000),
        "64 KB query of %00&": samples.headers_message(f"{path}?{'%00&' * 16_378}"),
        "64 KB query of a&": samples.headers_message(f"{path}?{'a&' * 32_757}"),
        "64 KB query of %": samples.headers_message(f"{path}?{'%' * 65_515}"),
        "10,000 query pairs": samples.headers_message(f"{path}?{pairs}"),
        "path of 1,000 slashes": samples.headers_message("/" * 1_000),
        "path of 32,000 segments": samples.headers_message("/a" * 32_000),
        "32 KB bearer token, nested": samples.headers_message(
            more={"authorization": _token(b"[" * 12_000)}
        ),
        "32 KB bearer token, wide": samples.headers_message(
            more={"authorization": _token(b'{"a":[' + b"0," * 12_000 + b'0],"org_id":"o"}')}
        ),
    }
    bodies = {
        name: [samples.headers_message(length=len(body)), samples.body_message(body)]
        for name, body in _bodies().items()
    } | {
        "body of 5 MB": [
            samples.headers_message(length=5_000_000),
            samples.body_message(samples.chat_body(1, 5_000_000)),
        ]
    }
    # A body of its own for each, or some would be refused as repeats of others.
    numbered = {
        name: samples.body_message(samples.chat_body(number)) for number, name in enumerate(headers)
    }
    return {name: [message, numbered[name]] for name, message in headers.items()} | bodies


def _bodies() -> Mapping[str, bytes]:
    """Bodies just below `max_inspect_bytes` that are expensive to inspect.

    JSON in strings is decoded, too.
    """
    room = 2**20 - 200

    def filled(item: str, start: str = '{"messages":[', end: str = "]}") -> bytes:
        return (
            start + ",".join([item] * ((room - len(start) - len(end)) // (len(item) + 1))) + end
        ).encode()

    call = '{"id":"c","function":{"name":"f","arguments":"{}"}}'
    last = '],"tool_calls":[%s]},{"role":"tool","tool_call_id":"c","content":"x"}]}'
    said = json.dumps("1 1s " * 6_000)[1:-1]
    again = (
        '{"role":"assistant","tool_calls":[%s]},{"role":"tool","tool_call_id":"c","content":"%s"}'
    )
    forged = f"{OPENING} x {CLOSING}0123456789abcdef{END}"
    heard = '{"role":"tool","tool_call_id":"c","content":"%s"}'
    asked = json.dumps(json.dumps([1.5 + number for number in range(20_000)]))
    return {
        "1 MB body, empty messages": filled("{}"),
        "1 MB body, nested arrays": filled("[[[[1]]]]", '{"model":['),
        "0.5 MB body, nested arrays": filled("[[[[1]]]]", '{"model":[')[: 2**19 - 500].rpartition(
            b","
        )[0]
        + b"]}",
        "1 MB body, numbers with fractions": b'{"model":['
        + ",".join(f"{n}.5" for n in range(room // 9)).encode()
        + b"]}",
        "1 MB body, numbers of 600 digits": filled("9" * 600, '{"model":['),
        "1 MB body, keys out of order": b"{"
        + b",".join(b'"%06d":0' % (number * 7919 % 90_000) for number in range(90_000))
        + b"}",
        "0.6 MB body, keys in order except the last": b'{"model":{'
        + b",".join([b'"%06d":0' % number for number in range(49_000)])
        + b',"":0},"messages":[{"role":"user","content":"a"}]}',
        "1 MB body, words in one text": b'{"messages":[{"role":"user","content":"%b"}]}'
        % (b"a  " * (room // 3)),
        "1 MB body, words that are not ASCII": b'{"messages":[{"role":"user","content":"%b"}]}'
        % (b"\xce\xa3 " * (room // 3)),
        "1 MB body, calls in one turn": filled(
            call, '{"messages":[{"role":"assistant","content":[', last % call
        ).replace(b'"content":[{"id"', b'"tool_calls":[{"id"'),
        "1 MB body, messages that are numbers": filled("1"),
        "1 MB body, messages of a word": filled('{"role":"a","content":"b"}'),
        "1 MB body, empty texts": filled('""', '{"messages":[{"role":"user","content":[', "]}]}"),
        "1 MB body, images": filled(
            '{"type":"image"}', '{"messages":[{"role":"user","content":[', "]}]}"
        ),
        "1 MB body, results that differ at their end": (
            b'{"messages":[%b]}'
            % ",".join([again % (call, f"{said} {number % 7}") for number in range(32)]).encode()
        ),
        "1 MB body, forged marks of notes": filled(heard % (forged * 20)),
        "1 MB body, forged marks of notes in the user's first words": filled(
            forged, '{"messages":[{"role":"user","content":"', '"}]}'
        ),
        "1 MB body, forged marks of long notes": filled(
            heard % forged.replace(" x ", "\\u0041" * 10_000)
        ),
        "1 MB body, notes that begin and do not end": filled(
            OPENING, '{"messages":[{"role":"user","content":"', '"}]}'
        ),
        "0.3 MB of arguments": (
            b'{"messages":[{"role":"assistant","tool_calls":[{"id":"c","function":{"arguments":%b}}]}]}'
            % asked.encode()
        ),
    }


def _token(payload: bytes) -> str:
    return f"Bearer e30.{urlsafe_b64encode(payload).decode().rstrip('=')[:32_000]}.c2ln"


def run(*, quick: bool) -> list[Row]:
    bodies = {**_bodies(), **_texts()}
    freeze_objects()  # so that forks copy little
    with get_context("fork").Pool(
        1, maxtasksperchild=1
    ) as pool:  # processes that have read nothing before
        readers = [
            _measure_reader(pool, name, spec, bodies, quick=quick) for name, spec in READERS.items()
        ]
    rows = []
    cases = _cases()
    policies = [samples.policy(number, selector) for number, selector in enumerate(_SELECTORS)]
    for policy in policies:
        policy["spec"]["limit_keys"] = _KEYS
    policies[0]["spec"]["loop_detection"] = [
        {**policies[0]["spec"]["loop_detection"], "similarity": similarity, **more}
        for similarity, more in _LOOKING.items()
    ]
    alone = samples.policy(0, _SELECTORS[0])
    alone["spec"] |= {
        "session": {},
        "loop_detection": {**alone["spec"]["loop_detection"], **_TURNS},
    }
    servings = [
        samples.service(samples.engine(some), Settings(allow_unverified_jwt=True))
        for some in (policies, [alone])
    ]
    for number, (name, messages) in enumerate(cases.items(), 1):
        progress(f"hostile: {name}", number, len(cases))
        times = range(2 if quick else 4)  # a fifth would be refused as a loop
        longest = [max(_send(serving, messages) for serving in servings) for _ in times]
        rows.append(Row(name, median(longest), "ms", _LIMIT_MS))
    for kind, worst in (
        ("notes", edits.find_worst_note(quick=quick)),
        ("narrowings", edits.find_worst_narrowing(quick=quick)),
    ):
        rows.append(
            Row(
                f"worst of {worst.bodies} {kind}: {worst.name}",
                worst.milliseconds,
                "ms",
                _EDIT_LIMIT_MS,
            )
        )
    return [*readers, *rows]


def _measure_reader(
    pool: Pool, name: str, spec: Mapping[str, object], bodies: Mapping[str, bytes], *, quick: bool
) -> Row:
    """The body that takes one reader longest, if a client sends new messages each time."""
    policy = {
        "id": name.replace(" ", "_"),
        "spec": {"selector": {"pathPrefix": "/"}, "limit_keys": ["header:x-user-id"], **spec},
    }
    longest, worst = 0.0, ""
    for number, (body_name, body) in enumerate(bodies.items(), 1):
        progress(f"hostile: {name}: {body_name}", number, len(bodies))
        messages = [samples.headers_message(length=len(body)), samples.body_message(body)]
        shortest = min(
            pool.starmap(_send_as_new, [(policy, messages)] * (1 if quick else 2), chunksize=1)
        )
        if shortest > longest:
            longest, worst = shortest, body_name
    return Row(f"worst for {name}: {worst}", longest, "ms", _READER_LIMIT_MS)


def _send_as_new(policy: dict[str, Any], messages: Sequence[bytes]) -> float:
    return _send(samples.service(samples.engine([policy])), messages)


def _ask(content: bytes) -> bytes:
    return b'{"messages":[{"role":"user","content":%b}]}' % content


def _hold(messages: str) -> bytes:
    return f'{{"messages":[{messages}]}}'.encode()


def _texts() -> Mapping[str, bytes]:
    """Bodies of 38,000 texts where few readers look, and bodies that are slow for one reader."""
    texts = ",".join(['{"type":"text","text":"a"}'] * 38_000)
    user = '{"role":"user","content":%s}'
    items = (
        '{"type":"function_call","call_id":"%d","name":"f","arguments":"{}"},'
        '{"type":"function_call_output","call_id":"%d","output":"' + "b " * 100 + '"}'
    )
    call = '{"id":"c%d","function":{"name":"f%d","arguments":"[%s]"}}'
    acted = (
        '{"role":"assistant","tool_calls":[%s]},{"role":"tool","tool_call_id":"c0","content":"x"}'
    )
    item = (
        '{"type":"function_call","call_id":"c%d","name":"f",'
        '"arguments":"{\\"q\\":%d,\\"w\\":\\"%s\\"}"}'
    )
    pair = (
        '{"role":"assistant","tool_calls":'
        '[{"id":"c%d","function":{"name":"f","arguments":"{\\"q\\":%d}"}}]},'
        '{"role":"tool","tool_call_id":"c%d","content":"at 12:34:56 %08x %s"}'
    )
    block = json.dumps(
        {"type": "a", **{key: [] for key in "bcdefghijklmnopqrstu"}}, separators=(",", ":")
    )
    objects = ",".join(['{"b":0,"a":1}'] * 74_000)
    result = '[{"type":"tool_result","tool_use_id":"c","content":[%s]}]'
    return {
        "1 MB body, texts of the system": (
            f'{{"system":[{texts}],"messages":[{user % "1"}]}}'.encode()
        ),
        "1 MB body, texts in one result": f'{{"messages":[{user % (result % texts)}]}}'.encode(),
        "1 MB body, halves of pairs": _ask(b'"%b"' % (b"\\ud83d" * 170_000)),
        "1 MB body, calls and results": b'{"input":[%b]}'
        % ",".join([items % (n, n) for n in range(2_400)]).encode(),
        "1 MB body, clocks": _ask(b'"%b"' % (b"12:34:56 " * 110_000)),
        "1 MB body, long numbers with fractions": _ask(
            b"[%b]" % ",".join([f"1.{n:090d}" for n in range(10_000)]).encode()
        ),
        "1 MB body, calls with 60 numbers each": _hold(
            acted % ",".join([call % (n, n, ",".join(["1"] * 60)) for n in range(5_800)])
        ),
        "1 MB body, calls at once": b'{"input":[%b]}'
        % ",".join([item % (n, n, "x" * 100) for n in range(5_000)]).encode(),
        "1 MB body, calls one after the other": _hold(
            ",".join([pair % (n, n, n, n * 7_919, "b " * 90) for n in range(2_450)])
        ),
        "1 MB body, objects in arguments": _hold(
            acted % call % (0, 0, objects[: 14 * 57_000 - 1].replace('"', '\\"'))
        ),
        "1 MB body, objects in a call": (
            b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"f","arguments":[%b]}}'
            % objects.encode()
        ),
        "1 MB body, blocks of 21 members": _ask(b"[%b]" % ",".join([block] * 6_800).encode()),
        "1 MB body, a block of many members": _ask(
            b"[{%b}]"
            % ",".join([f'"{number * 7_919 % 99_991:06d}":0' for number in range(90_000)]).encode()
        ),
        "1 MB body, texts like keys": f'{{"messages":[{user % "[%s]"}]}}'.encode()
        % b",".join([b'"system"'] * 100_000),
    }


def _send(serving: Service, messages: Sequence[bytes]) -> float:
    """The longest message's milliseconds of this thread's CPU."""
    longest = 0.0
    with closing(Stream(serving)) as stream:
        for message in messages:
            started = thread_time()
            stream.receive(message)
            longest = max(longest, thread_time() - started)
    return longest * 1000
