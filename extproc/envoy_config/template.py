"""YAML with gaps, which stays YAML to an editor.

- `$name` stands for a value.
- `#$name`, alone on its line, stands for a block, each line of which takes on the indentation; an empty one leaves no line.
- `#if name`, `#else`, `#end`, each alone on its line: what stands between goes out only where the value is there, or is not.

Comments that go out start with `# `.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping


def fill(template: str, values: Mapping[str, str | bool]) -> str:
    """The template with its gaps filled."""
    return "".join(_fill_lines(template, values))


def _fill_lines(template: str, values: Mapping[str, str | bool]) -> Iterator[str]:
    shown = [True]  # whether lines go out: at first, then inside of each #if that is open
    for line in template.splitlines(keepends=True):
        match line.split():
            case ["#if", name]:
                shown.append(shown[-1] and bool(values[name]))
            case ["#else"]:
                shown[-1] = shown[-2] and not shown[-1]
            case ["#end"]:
                shown.pop()
            case _ if not shown[-1]:
                pass
            case [block] if block.startswith("#$"):
                yield from _indent(str(values[block[2:]]), line[: line.index("#")])
            case _:
                yield re.sub(r"\$(\w+)", lambda found: str(values[found[1]]), line)


def _indent(block: str, indent: str) -> Iterator[str]:
    for line in block.splitlines():
        yield f"{indent}{line}".rstrip() + "\n"
