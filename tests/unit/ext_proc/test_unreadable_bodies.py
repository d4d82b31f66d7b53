"""Bodies with one wrong value, anywhere in any API: each is counted, or uncounted for a reason."""

import json
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest

from extproc.ext_proc.service import Service
from tests.support.extent import deepen
from tests.support.service import (
    ask,
    headers_of,
    list_uncounted,
    make_service,
    sample,
)
from tests.support.turn_writers import PATHS, SHAPES, Did

FILES: list[dict[str, Any]] = [
    {"type": "image", "source": {"type": "base64", "data": "aaaa"}},
    {"type": "document", "source": {"type": "text", "data": "x"}},
    {"type": "made_up", "value": {"a": ["b"]}},
]
SPELLED = {
    "bad byte": b'"a\xffb"',
    "half of a pair": b'"\\ud83d"',
    "wide number": b"9" * 700,
    "power": b"1e999",
}
WRONG = [*[f"@{name}@" for name in SPELLED], "", None, 1.5, [], {}, [1], [None], {"a": 1}]
_TURNS = cycle(WRONG[1:])
TURN = Did((("run", {"cmd": "ls", "n": 1.5}),), ("Error: no such file",), "again", "hm")


def _write(shape: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(SHAPES[shape]([TURN])))
    key = next(key for key in ("messages", "input", "contents") if key in made)
    for message in made[key]:
        inner = "output" if "output" in message else "parts" if "parts" in message else "content"
        said = message.get(inner)
        if isinstance(said, str):
            said = [{"type": "text", "text": said}]
        if isinstance(said, list):
            for block in said:
                if block.get("type") == "tool_result":
                    block["content"] = [{"type": "text", "text": block["content"]}, *FILES]
            message[inner] = said + FILES
    return made | {
        "system": [{"text": "s"}],
        "tools": [{"name": "run"}],
        "metadata": {"user_id": "u"},
    }


def _mutate(value: Any) -> Iterator[Any]:  # noqa: ANN401  # of JSON
    yield from (WRONG[0], next(_TURNS))
    if isinstance(value, dict):
        for key, inner in value.items():
            rest = {name: each for name, each in value.items() if name != key}
            yield rest
            yield rest | {"@bad byte@": inner}
            yield from [value | {key: changed} for changed in _mutate(inner)]
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from [
                [*value[:place], changed, *value[place + 1 :]] for changed in _mutate(inner)
            ]


def _spell(value: Any) -> bytes:  # noqa: ANN401  # of JSON
    data = json.dumps(value).encode()
    for name, spelled in SPELLED.items():
        data = data.replace(f'"@{name}@"'.encode(), spelled)
    return data


def _policies(uncountable: str) -> list[dict[str, Any]]:
    rule = {"name": "r", "limit_keys": ["header:x-user"], "algorithm": "token_bucket_llm"}
    readers: dict[str, dict[str, Any]] = {
        name: {
            "loop_detection": {
                "enabled": True,
                "window_seconds": 60,
                "similarity": name,
                "threshold_identical_requests": 8,
            }
        }
        for name in ("turns", "canonical", "tail", "tool_calls", "mcp")
    }
    readers["session_limits"] = {"session_limits": {"max_steps": 9_000, "max_tool_calls": 9_000}}
    readers["budgets"] = {
        "rules": [{**rule, "algorithm_config": {"tokens_per_minute": 1_000_000_000}}]
    }
    common = {
        "selector": {"pathPrefix": "/"},
        "limit_keys": ["header:x-user"],
        "uncountable": uncountable,
    }
    return [{"id": name, "spec": {**common, **spec}} for name, spec in readers.items()]


def _sum_uncounted(service: Service) -> dict[str, float]:
    """The number of policies that did not count, by reason; `not_a_call` is harmless."""
    found = list_uncounted(service)
    found.pop("not_a_call", None)
    return found


def _refused_for(service: Service, path: str, data: bytes, user: str = "u") -> str:
    answer = ask(service, data, path, x_user=user)
    return (
        headers_of(answer).get("X-Fairvisor-Reason", "")
        if answer.HasField("immediate_response")
        else ""
    )


@pytest.mark.slow
@pytest.mark.parametrize("shape", deepen(SHAPES, "chat", "anthropic"))
def test_wrong_value_is_counted_or_has_a_reason(shape: str) -> None:
    """With `uncountable: reject`, exactly what is not counted is refused."""
    lenient, strict = make_service(*_policies("allow")), make_service(*_policies("reject"))
    for number, value in enumerate(_mutate(_write(shape))):
        data, before = _spell(value), _sum_uncounted(lenient)
        refused = [
            _refused_for(service, PATHS[shape], data, f"u{number}") for service in (lenient, strict)
        ]

        assert refused == ["", "" if _sum_uncounted(lenient) == before else "uncountable"], data
        assert sample(lenient, "fail_open_total", reason="internal_error") == 0, data


@pytest.mark.parametrize("uncountable", ["allow", "reject"])
@pytest.mark.parametrize("file", [0, 1, 2])
def test_loop_with_a_binary_file_is_uncounted(file: int, uncountable: str) -> None:
    said = [{"type": "text", "text": "x"}, FILES[file] | {"more": "@bad byte@"}]
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    turn = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": said},
    ]
    service = make_service(_policies(uncountable)[0])

    refused = _refused_for(
        service, PATHS["chat"], _spell({"messages": [{"role": "user", "content": "x"}, *turn * 7]})
    )

    assert refused == ("uncountable" if uncountable == "reject" else "")
    assert _sum_uncounted(service) == {"not_json": 1}
    assert sample(service, "fail_open_total", reason="internal_error") == 0


@pytest.mark.parametrize("reader", ["turns", "session_limits"])
def test_history_may_begin_with_the_assistant(reader: str) -> None:
    service = make_service(*[each for each in _policies("reject") if each["id"] == reader])
    user, assistant = {"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}

    for said in (
        [user],
        [assistant],
        [assistant, user | {"content": "y"}],
        [user, assistant | {"content": "y"}],
    ):
        assert _refused_for(service, PATHS["chat"], _spell({"messages": said})) == ""
    assert sample(service, "fail_open_total", reason="internal_error") == 0


@pytest.mark.sources  # compiled classes keep their methods
@pytest.mark.parametrize("mode", ["enforce", "shadow"])
def test_error_while_reading_leaves_the_request_uncounted(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.detectors.canonical.Canonical.compare", None)
    policy = _policies("reject")[1]
    policy["spec"]["mode"] = mode
    service = make_service(policy)

    refused = _refused_for(service, PATHS["chat"], b'{"messages":[{"role":"user","content":"x"}]}')

    assert refused == ("uncountable" if mode == "enforce" else "")
    assert _sum_uncounted(service) == {"unreadable": 1}
    assert (
        sample(
            service,
            "fail_open_total",
            reason="internal_error" if mode == "enforce" else "shadow_error",
        )
        == 1
    )
