"""YAML templates that are still valid YAML for an editor.

- `$name` is replaced by a value.
- `#$name`, alone on its line, is replaced by a block with the same indentation; an empty block
  leaves no line.
- `#if name`, `#else`, `#end`, each alone on its line: print the lines between if the value is true,
  else the others.
- `#part place`, `#end`: lines that can also be printed alone. Parts with the same place are joined.

Comments to print start with `# `.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from textwrap import dedent


def fill(template: str, values: Mapping[str, str | bool]) -> str:
    return "".join(line for _, line in _fill_lines(template, values))


def cut_parts(template: str, values: Mapping[str, str | bool]) -> dict[str, str]:
    """The filled parts by place, without their indentation in the template."""
    parts: dict[str, str] = {}
    for place, line in _fill_lines(template, values):
        if place:
            parts[place] = parts.get(place, "") + line
    return {place: dedent(text) for place, text in parts.items()}


def _fill_lines(template: str, values: Mapping[str, str | bool]) -> Iterator[tuple[str, str]]:
    """Each printed line and the place of its part, which is empty outside of parts."""
    shown, places = [True], [""]  # stacks: whether to print lines, and their part
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
                for item in str(values[block[2:]]).splitlines():
                    yield places[-1], f"{line[: line.index('#')]}{item}".rstrip() + "\n"
            case _:
                yield places[-1], re.sub(r"\$(\w+)", lambda found: str(values[found[1]]), line)
