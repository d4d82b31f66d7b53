"""The functions that one request passes through, in order, as Markdown.

`python -m tests.support.trace turns` prints one kind of request, without a name all. It traces the
sources: compiled functions do not report calls.
"""

import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import extproc
from tests.bench import samples

ROOT = Path(extproc.__file__).parent
_GENERATED = "pb/"
# Parts of the enclosing function; Python 3.12 inlines most of them.
_INLINE = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>"}

# In the agent's history: enough for `turns` to compare.
_CALLS = 3

Request: TypeAlias = tuple[dict[str, Any], Callable[[int], bytes]]

# All pass. Those of `session` are `turns` with a session.
REQUESTS: dict[str, Request] = {
    "exact": (samples.policy(), samples.chat_body),
    "turns": (
        samples.policy(similarity="turns"),
        lambda number: samples.agent_body(1, number + _CALLS),
    ),
    "session": (samples.talk(), lambda number: samples.agent_body(1, number + _CALLS)),
}


class Way:
    """Functions by first call, as (module, function); modules are paths below the package."""

    def __init__(self) -> None:
        self.functions: dict[tuple[str, str], None] = {}

    @property
    def modules(self) -> list[str]:
        return list(dict.fromkeys(module for module, _ in self.functions))

    def watch(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        file = Path(code.co_filename)
        if event == "call" and code.co_name not in _INLINE and file.is_relative_to(ROOT):
            module = str(file.relative_to(ROOT))
            if not module.startswith(_GENERATED):
                self.functions[module, code.co_qualname] = None

    def write(self) -> str:
        numbers = {function: number for number, function in enumerate(self.functions, 1)}
        lines = []
        for room in dict.fromkeys(module.partition("/")[0] for module in self.modules):
            lines += ["", f"## {room.removesuffix('.py')}"]
            for module in [module for module in self.modules if module.partition("/")[0] == room]:
                lines += ["", f"`{module}`", ""]
                lines += [
                    f"{numbers[each]}. `{each[1]}`{describe(*each)}"
                    for each in self.functions
                    if each[0] == module
                ]
        return "\n".join(lines)


def describe(module: str, function: str) -> str:
    found = sys.modules[
        f"extproc.{module.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")
    ]
    try:
        words = attrgetter(function)(found).__doc__
    except AttributeError:  # of a function in a function
        words = None
    return f": {words.splitlines()[0]}" if words else ""


def trace(policy: dict[str, Any], write_body: Callable[[int], bytes]) -> Way:
    """The way of a client's third request, when all caches are warm.

    Raises RuntimeError if it was refused.
    """
    serving = samples.service(samples.engine([policy]))
    for number in range(2):
        samples.process(serving, make_messages(write_body(number)))
    messages, way = make_messages(write_body(2)), Way()
    sys.setprofile(way.watch)
    try:
        samples.process(serving, messages)
    finally:
        sys.setprofile(None)
    return way


def make_messages(body: bytes) -> list[bytes]:
    return [samples.headers_message(length=len(body)), samples.body_message(body)]


def main(names: list[str]) -> None:
    for name in names or REQUESTS:
        way = trace(*REQUESTS[name])
        print(f"# `{name}`: {len(way.functions)} functions in {len(way.modules)} modules")
        print(way.write(), "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
