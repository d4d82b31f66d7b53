"""What one reader of a body may spend: enough for real agents, whatever others have spent."""

import json
from base64 import b64encode
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from extproc.request.document import MAX_STEPS
from tests.bench.hostile import READERS
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.service import exchange, list_uncounted, make_service
from tests.support.turn_writers import PATHS, SHAPES, Did

_MIB = 2**20


def _reader(name: str, identity: str, mode: str = "enforce") -> dict[str, Any]:
    made = policy(identity, ANY, mode=mode, limit_keys=["header:x-user-id"])
    del made["spec"]["loop_detection"]
    made["spec"] |= READERS[name]
    return made


def _judge(policies: Sequence[dict[str, Any]], path: str, data: bytes) -> dict[str, float]:
    """Why the policy `watched` did not count a body."""
    service = make_service(*policies)
    exchange(service, headers(path, x_user_id="u"), body(data))
    return list_uncounted(service, "watched")


def _write_messages(count: int) -> bytes:
    return json.dumps(
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            * count
        }
    ).encode()


def _write_numbers(count: int) -> bytes:
    call = {"id": "c", "function": {"name": "f", "arguments": json.dumps([0.5] * count)}}
    told = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]}
    return json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}, told]}).encode()


def _write_parts(count: int) -> bytes:
    return json.dumps(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * count}]}
    ).encode()


def _write_blocks(count: int) -> bytes:
    block: dict[str, dict[str, str]] = {f"{number}": {} for number in range(20)}
    return json.dumps({"messages": [{"role": "user", "content": [block] * (count // 5)}]}).encode()


def _write_calls(count: int) -> bytes:
    call = {"id": "c", "function": {"name": "f", "arguments": "[" + "1," * 80 + "1]"}}
    told = [{"role": "tool", "tool_call_id": "c", "content": "x"}]
    return json.dumps(
        {"messages": [{"role": "assistant", "tool_calls": [call] * (count // 3)}, *told]}
    ).encode()


def _write_items(count: int) -> bytes:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "x"}
    return json.dumps({"input": [*[call] * (count // 3), output]}).encode()


_WRITERS: dict[str, Callable[[int], bytes]] = {
    "messages": _write_messages,
    "numbers": _write_numbers,
    "parts": _write_parts,
    "blocks": _write_blocks,
    "calls": _write_calls,
    "items": _write_items,
}


def _find_path(kind: str) -> str:
    return PATHS["responses" if kind == "items" else "chat"]


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.sampled_from(sorted(READERS)),
    st.lists(
        st.tuples(st.sampled_from(sorted(READERS)), st.sampled_from(["enforce", "shadow"])),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 4),
    st.sampled_from(sorted(_WRITERS)),
    st.integers(MAX_STEPS // 4, MAX_STEPS * 5 // 4),
)
def test_reader_does_not_depend_on_other_readers(
    watched: str, others: list[tuple[str, str]], place: int, kind: str, count: int
) -> None:
    data = _WRITERS[kind](count)
    beside = [_reader(name, f"{number}", mode) for number, (name, mode) in enumerate(others)]
    for mode in ("enforce", "shadow"):
        mine = _reader(watched, "watched", mode)

        together = _judge([*beside[:place], mine, *beside[place:]], _find_path(kind), data)

        assert together == _judge([mine], _find_path(kind), data)


@pytest.mark.slow
@pytest.mark.parametrize("kind", _WRITERS)
def test_every_kind_of_work_is_bounded(kind: str) -> None:
    policies = [_reader(name, "watched") for name in sorted(READERS)]
    little, much = [
        [_judge([each], _find_path(kind), _WRITERS[kind](count)) for each in policies]
        for count in (MAX_STEPS // 4, MAX_STEPS * 5)
    ]

    assert not any("inspect_limit" in uncounted for uncounted in little)
    assert any("inspect_limit" in uncounted for uncounted in much)


def _work(random: Random, number: int) -> Did:
    code = "\n".join(
        [
            f"    total[{n}] = compute(a, b={random.random():.3f}, c=[{n}, {number}])"
            for n in range(8)
        ]
    )
    given = {"path": f"src/module_{number}.py", "old": code, "new": f"{code}\n", "count": number}
    return Did(
        (("edit", given),),
        (f"{number} lines changed\n{code}\n{code}",),
        thought=f"Now step {number}.",
        number=number,
    )


def _work_briefly(_: Random, number: int) -> Did:
    return Did(
        (("run", {"command": f"make test-{number}", "timeout": 60}),),
        (f"ok {number}",),
        number=number,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, "chat") for name in READERS),
        *(("turns", shape) for shape in SHAPES if shape != "chat"),
    ],
)
@pytest.mark.parametrize(
    ("work", "turns"), [(_work, 400), (_work_briefly, 800)], ids=["long turns", "short turns"]
)
def test_long_histories_of_agents_are_inspected(
    name: str, shape: str, work: Callable[[Random, int], Did], turns: int
) -> None:
    random = Random(7)
    data = json.dumps(
        SHAPES[shape]([work(random, number) for number in range(1, turns + 1)])
    ).encode()

    assert len(data) <= _MIB
    assert "inspect_limit" not in _judge([_reader(name, "watched")], PATHS[shape], data)


@pytest.mark.parametrize("name", READERS)
def test_dozens_of_images_are_inspected(name: str) -> None:
    image = b64encode(Random(7).randbytes(9_000)).decode()
    messages: list[dict[str, Any]] = []
    for number in range(60):
        call = {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": "click", "arguments": f'{{"x":{number}}}'},
        }
        shown = {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{image}", "detail": "low"},
        }
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": f"page {number}"},
            {"role": "user", "content": [{"type": "text", "text": f"Page {number}"}, shown]},
        ]
    data = json.dumps({"model": "m", "messages": messages}).encode()

    assert _MIB * 0.6 < len(data) < _MIB
    assert "inspect_limit" not in _judge([_reader(name, "watched")], PATHS["chat"], data)
