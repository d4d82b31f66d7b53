"""The parts of docs/architecture.md that the code itself tells: the picture of its imports, and a request's way.

.venv/bin/python -m tests.support.architecture            writes them into the page
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.support import ROOT
from tests.support.rooms import FILES, ROOMS, find_imports
from tests.support.trace import REQUESTS, trace

PAGE = ROOT / "docs" / "architecture.md"
_END = "<!-- end -->"


def fill_page(text: str) -> str:
    """The page with both parts as they are now; raises ValueError if it has no place for one."""
    for name, part in (("picture", draw_imports()), ("way", write_way())):
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, behind = rest.partition(_END)
        if not mark or not end:
            raise ValueError(f"{PAGE.name} has no place for the {name}")
        text = f"{before}{mark}\n{part}\n\n{end}{behind}"
    return text


def draw_imports() -> str:
    """Which room imports which, as Mermaid draws it; without what follows from other imports."""
    imports: dict[str, set[str]] = {room: set() for room in ROOMS}
    for name, file in FILES.items():
        room = name.split("/")[0]
        if room in imports:
            imports[room] |= {target.split("/")[0] for target in find_imports(file.read_text())} & {*ROOMS} - {room}
    edges = [f"    {room} --> {target}" for room in reversed(ROOMS) for target in _list_nearest(imports, imports[room])]
    return "\n".join(["```mermaid", "flowchart TD", *edges, "```"])


def _list_nearest(imports: dict[str, set[str]], targets: Iterable[str]) -> list[str]:
    """Those of some rooms that none of the others imports."""
    chosen = set(targets)
    return sorted(room for room in chosen if not any(room in imports[other] for other in chosen))


def write_way() -> str:
    """The modules that an allowed request passes through, by first call, and the functions that are not private to them."""
    way = trace(*REQUESTS["exact"])
    lines = [f"{len(way.functions)} functions in {len(way.modules)} modules; those that are not private:", ""]
    for module in way.modules:
        names = [name.rpartition(".")[2] for place, name in way.functions if place == module]
        shown = ", ".join([f"`{name}`" for name in dict.fromkeys(names) if not name.startswith("_")])
        lines.append(f"- `{module}`" + (f": {shown}" if shown else ""))
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(fill_page(PAGE.read_text()))
