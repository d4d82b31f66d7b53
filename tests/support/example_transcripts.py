"""The example set of `loopguard scan`: four agents that loop, one that waits, and others that work.

`python -m tests.support.example_transcripts examples/transcripts` writes it.
"""

import json
import sys
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from tests.support.transcripts import (
    AgentSession,
    write_atif,
    write_claude_code,
    write_codex,
    write_otlp,
    write_requests,
)
from tests.support.turn_writers import Did

_DAY: Final = datetime(2026, 11, 2, 9, 0, tzinfo=UTC)
_EDITED: Final = {
    "file_path": "src/cart.ts",
    "old_string": "  const total = price * count;",
    "new_string": "  const total = sum(items);",
}
_NOT_FOUND: Final = (
    "<tool_use_error>String to replace not found in file.\nString:   const total "
    "= price * count;</tool_use_error>"
)
_NO_FILE: Final = "File does not exist. Note: your current working directory is /home/ann/shop."
_FORBIDDEN: Final = (
    "HTTP 403 Forbidden: the token has no scope `packages:write`. Ask an owner of the "
    "organisation for it, then sign in again. "
    "The request was refused by the registry before any file was read, so nothing has changed."
)
_NO_SCRIPT: Final = (
    'npm error Missing script: "build"\nnpm error To see a list of scripts, run: npm run'
)


def run_shell(command: str, result: str, tool: str = "Bash") -> Did:
    return Did(((tool, {"cmd" if tool == "exec_command" else "command": command}),), (result,))


def _work(count: int, tool: str = "Bash") -> list[Did]:
    done = []
    for number in range(1, count + 1):
        lines = f"{40 * number},{40 * number + 30}"
        done.append(
            run_shell(f"sed -n '{lines}p' src/cart.ts", f"export function step{number}() {{", tool)
        )
        if not number % 2:
            done.append(
                run_shell(
                    "npm test", f"Tests: {12 - number // 2} failed, {40 + number // 2} passed", tool
                )
            )
    return done


def _search(numbers: Iterable[int]) -> list[Did]:
    return [
        Did(
            (("search_orders", {"customer": 4_000 + number}),),
            (f"order {9_000 + number}: delivered",),
        )
        for number in numbers
    ]


def _list_claude() -> list[AgentSession]:
    main = "5f0c7a52-7d0e-4b8e-9a55-2f3f2f6f1c01"
    edit = Did((("Edit", _EDITED),), (_NOT_FOUND,))
    read = Did((("Read", {"file_path": "docs/pricing.md"}),), (_NO_FILE,))
    return [
        AgentSession([*_work(6), *[edit] * 31], main, _DAY, prompt=48_000),
        AgentSession([*_work(3), *[read] * 19], main, _DAY, side="a41f09c2", prompt=21_000),
        AgentSession(
            _work(8),
            "9b1d3c60-0c49-4f0e-8d8b-6f1e8d0b7a02",
            _DAY + timedelta(days=1),
            prompt=30_000,
        ),
        AgentSession(
            _work(7),
            "c2a8f4e7-53a1-47f3-b1c9-0d9a7e6c5b03",
            _DAY + timedelta(days=2),
            prompt=30_000,
        ),
    ]


def _list_codex() -> list[AgentSession]:
    tool, names = (
        "exec_command",
        (
            "81dd-7781-bb28-f2698a15e692",
            "3751-7211-b4a6-1816eb4d155f",
            "0429-7c02-bac2-ef0859c2ff91",
        ),
    )
    failing = [
        run_shell("ls dist", "ls: cannot access 'dist': No such file or directory", tool),
        run_shell("npm run build", _NO_SCRIPT, tool),
    ]
    waiting = [run_shell("gh run view 4711 --json status", "in_progress", tool)] * 9
    done = [[*_work(4, tool), *failing * 9], [*_work(3, tool), *waiting], _work(8, tool)]
    return [
        AgentSession(
            turns, f"01a2142c-{name}", _DAY + timedelta(days=day), model="gpt-5", prompt=24_000
        )
        for day, (turns, name) in enumerate(zip(done, names, strict=True), 1)
    ]


def list_examples() -> dict[str, str]:
    publish = [
        run_shell(f"npm publish --registry https://registry.example/{number}", _FORBIDDEN, "bash")
        for number in range(12)
    ]
    later = _DAY + timedelta(days=3)
    trial = AgentSession(
        [*_work(3, "bash"), *publish], "trial-7", later, agent="terminus-2", model="gpt-5-mini"
    )
    ask = Did((("search_orders", {}),), ("Error: missing required argument: customer",))
    support = [
        AgentSession(
            [*_search(range(2)), *[ask] * 11], "r1", later, agent="support", model="gpt-4.1"
        ),
        AgentSession(
            _search(range(10, 15)),
            "r2",
            later + timedelta(hours=1),
            agent="support",
            model="gpt-4.1",
        ),
    ]
    traced = [
        AgentSession(
            _search(range(first, first + 4)),
            f"c{first}",
            later,
            project="refunds",
            agent="refunds",
            model="gpt-4.1",
        )
        for first in (20, 30)
    ]
    files: dict[str, list[dict[str, Any]]] = {}
    for session in _list_claude():
        side = f"/subagents/agent-{session.side}" if session.side else ""
        files[f"claude-code/-home-ann-shop/{session.name}{side}.jsonl"] = write_claude_code(session)
    for session in _list_codex():
        name = f"rollout-{session.begins:%Y-%m-%dT%H-%M-%S}-{session.name}.jsonl"
        files[f"codex/{session.begins:%Y/%m/%d}/{name}"] = write_codex(session)
    files["harbor/trajectory.json"] = [write_atif(trial)]
    files["gateway/requests.jsonl"] = [
        line for session in support for line in write_requests(session, "chat")
    ]
    files["traces/spans.jsonl"] = [line for session in traced for line in write_otlp(session)]
    return {
        name: "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines)
        for name, lines in files.items()
    }


def write_examples(folder: Path) -> None:
    for name, text in list_examples().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


if __name__ == "__main__":
    write_examples(Path(sys.argv[1]))
