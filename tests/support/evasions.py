"""What agents vary while they loop, by accident or on purpose; sixteen turns each."""

from collections.abc import Callable
from typing import Any

from tests.support.turn_writers import Did

TURNS = 16

_TOKENS = ("8fKs92mXa01", "Zx81kQp3Tt9", "aB3dE9xYq72", "Qm71LpZ0vVe", "t5RrW2nHj8c", "x90AsDkP4oM")


def _call(tool: str, result: str, **arguments: Any) -> Did:  # noqa: ANN401  # JSON
    return Did(((tool, arguments),), (result,))


def _read(**more: Any) -> Did:  # noqa: ANN401
    return _call("read_file", "nothing here", path="src/app.py", **more)


def _run(command: str, result: str = "nothing to do") -> Did:
    return _call("bash", result, command=command)


def _or_think(number: int, tool: str, **thoughts: object) -> Did:
    return _call(tool, "ok", **thoughts) if number % 2 else _read()


# By what varies: the turn of each number. docs/detectors.md says what still hides a loop.
EVASIONS: dict[str, Callable[[int], Did]] = {
    "nothing": lambda _: _read(),
    "a reason": lambda n: _read(reason=f"look no. {n}"),
    "a description": lambda n: _read(description=f"look no. {n}"),
    "an explanation": lambda n: _read(explanation=f"look no. {n}"),
    "an attempt's number": lambda n: _read(attempt=n),
    "a request's id": lambda n: _read(request_id=f"r-{n}"),
    "a timestamp": lambda n: _read(timestamp=f"2026-11-24T10:{n:02}:07Z"),
    "blanks behind a command": lambda n: _run("make test" + " " * n),
    "a comment behind a command": lambda n: _run(f"make test # try {n}"),
    "a thought every second turn": lambda n: _or_think(n, "think", thought=f"no. {n}"),
    "a to-do list every second turn": lambda n: _or_think(
        n, "TodoWrite", todos=[{"content": f"no. {n}"}]
    ),
    "a plan every second turn": lambda n: _or_think(n, "update_plan", plan=[{"step": f"no. {n}"}]),
    "the order of a search's words": lambda n: _call(
        "web_search",
        "no results",
        query=" ".join(
            ["python", "asyncio", "timeout"][n % 3 :] + ["python", "asyncio", "timeout"][: n % 3]
        ),
    ),
    "the order of an argument's keys": lambda n: _read(a=1, b=2) if n % 2 else _read(b=2.0, a=1.0),
    "a rate and what is left": lambda n: _run("get", f"45 % at {n}.{n} MB/s ETA 0:00:{n:02}"),
    "a bar that is drawn again": lambda n: _run("get it", f"{n} %\r{n + 20} %\rdone"),
    "a request's id in a result": lambda n: _run("get it", f"refused (req_{_TOKENS[n % 6]}{n})"),
    "an address in a result": lambda n: _run("get it", f"<Job at 0x7f12ab34{n:02}>"),
    "a Unix time in a result": lambda n: _run("get it", f'{{"at": {1763792054 + n}}}'),
    "the order of a set in a result": lambda n: _run(
        "get it", "{'b', 'a', 'c'}" if n % 2 else "{'c', 'b', 'a'}"
    ),
    "an edit and its opposite": lambda n: _call(
        "edit", "ok", path="a.py", old="ab"[n % 2], new="ba"[n % 2]
    ),
    "an argument of another name": lambda n: _read(round=n),
    "an increasing offset": lambda n: _read(offset=n),
    "a reworded command": lambda n: _run("make " + " ".join(["-s"] * n) + " test"),
    "a changing percentage": lambda n: _run("get it", f"{n} %"),
    "an unlabelled token in a result": lambda n: _run("get it", f"state {_TOKENS[n % 6]}{n}"),
    "a changing order of lines in a result": lambda n: _run(
        "ls", "\n".join([f"f{(n * 5 + line) % 13}" for line in range(13)])
    ),
    "a user's words that ask to continue": lambda n: Did(
        (), (), user=f"Go on, please ({'very ' * n}soon).", thought="Done."
    ),
    "zero-width characters": lambda n: _read(of="a" + "\u200b" * n),
    "two alternating tools with a changing number": lambda n: _call(
        ["read_file", "view"][n % 2], "nothing here", path="a", n=n
    ),
}
