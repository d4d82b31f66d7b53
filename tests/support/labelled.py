"""A small labelled set for `make precision`: honest repetition and loops, made here.

It shows the effect of a rule or a setting, and nothing about real traffic.

`python -m tests.support.labelled` prints it.
"""

import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from tests.support.evasions import EVASIONS, TURNS
from tests.support.families import HONEST, UNTELLABLE, make_loop
from tests.support.turn_writers import SHAPES, STYLES, Did, Writer, as_text

# Variants of each family.
EACH = 5

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
_AGENT = {"name": "a", "version": "1", "tool_definitions": TOOLS}


def as_atif(turns: Sequence[Did]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"step_id": 1, "source": "user", "message": "Fix it."}]
    for number, turn in enumerate(turns, 2):
        calls = [
            {"tool_call_id": f"c{number}-{place}", "function_name": name, "arguments": given}
            for place, (name, given) in enumerate(turn.calls)
        ]
        step: dict[str, Any] = {
            "step_id": len(steps) + 1,
            "source": "agent",
            "message": turn.thought,
            "tool_calls": calls,
        }
        results = [
            {"source_call_id": f"c{number}-{place}", "content": result}
            for place, result in enumerate(turn.results)
        ]
        steps.append(step | {"observation": {"results": results}})
        if turn.user:
            steps.append({"step_id": len(steps) + 1, "source": "user", "message": turn.user})
    return {"schema_version": "ATIF-v1.7", "session_id": "s", "agent": _AGENT, "steps": steps}


def _as_react(turns: Sequence[Did]) -> dict[str, Any]:
    return as_text(turns, STYLES["react"])


FORMATS: dict[str, Writer] = {**SHAPES, "atif": as_atif, "text": _as_react}


def _write(place: int, turns: Sequence[Did], label: dict[str, Any], name: str) -> dict[str, Any]:
    """A conversation in the next format; in a text, each turn has an action."""
    kinds = [kind for kind in FORMATS if kind != "text" or all(turn.calls for turn in turns)]
    kind = kinds[place % len(kinds)]
    tools = {"tools": TOOLS} if kind not in ("text", "atif") else {}
    return {"id": name, "label": label, **FORMATS[kind](turns), **tools}


def make_set(seed: int = 1, each: int = EACH) -> Iterator[dict[str, Any]]:
    random = Random(seed)
    place = 0
    for name, family in {**HONEST, **UNTELLABLE}.items():
        for turns in random.sample(family(), each):
            place += 1
            honest = {"loop": False, "success": True, "kind": name}
            yield _write(place, turns, honest, f"{name} {place}")
    for name, family in HONEST.items():
        work = [
            Did((("read_file", {"path": f"a{n}.py"}),), (f"{n} lines",), "", f"I look at {n}.", n)
            for n in range(1, 5)
        ]
        for turns in random.sample(family(), each):
            place += 1
            begins = 1 + place % len(work)
            stuck = [
                *work[: begins - 1],
                *make_loop(turns, "error: permission denied for role agent"),
            ]
            yield _write(
                place,
                stuck,
                {"loop": True, "begins": begins, "success": False, "kind": f"stuck: {name}"},
                f"{name} {place}",
            )
    for name, write in EVASIONS.items():
        place += 1
        turns = [write(number)._replace(number=number + 1) for number in range(TURNS)]
        yield _write(
            place, turns, {"loop": True, "begins": 1, "kind": "varied", "success": False}, name
        )


if __name__ == "__main__":
    for line in make_set():
        print(json.dumps(line))
