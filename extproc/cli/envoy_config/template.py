"""YAML with gaps, which stays YAML to an editor.

- `$name` stands for a value.
- `#$name`, alone on its line, stands for a block, each line of which takes on the indentation; an empty one leaves no line.
- `#if name`, `#else`, `#end`, each alone on its line: what stands between goes out only where the value is there, or is not.
- `#part place`, `#end`: what stands between can also be had alone. Parts of one place are one.

Comments that go out start with `# `.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from textwrap import dedent


def fill(template: str, values: Mapping[str, str | bool]) -> str:
    """The template with its gaps filled."""
    return "".join(line for _, line in _fill_lines(template, values))


def cut_parts(template: str, values: Mapping[str, str | bool]) -> dict[str, str]:
    """The filled parts by their places, without the indentation that they have there."""
    parts: dict[str, str] = {}
    for place, line in _fill_lines(template, values):
        if place:
            parts[place] = parts.get(place, "") + line
    return {place: dedent(text) for place, text in parts.items()}


def _fill_lines(template: str, values: Mapping[str, str | bool]) -> Iterator[tuple[str, str]]:
    """Each line that goes out, with the place of the part that it is in, empty outside of all."""
    shown, places = [True], [""]  # whether lines go out, and where: at first, then inside of all that is open
    for line in template.splitlines(keepends=True):
        match line.split():
            case ["#if", name]:
                shown.append(shown[-1] and bool(values[name]))
                places.append(places[-1])
            case ["#part", place]:
                shown.append(shown[-1])
                places.append(place)
            case ["#else"]:
                shown[-1] = shown[-2] and not shown[-1]
            case ["#end"]:
                shown.pop()
                places.pop()
            case _ if not shown[-1]:
                pass
            case [block] if block.startswith("#$"):
                for item in _indent(str(values[block[2:]]), line[: line.index("#")]):
                    yield places[-1], item
            case _:
                yield places[-1], re.sub(r"\$(\w+)", lambda found: str(values[found[1]]), line)


def _indent(block: str, indent: str) -> Iterator[str]:
    for line in block.splitlines():
        yield f"{indent}{line}".rstrip() + "\n"
