"""The generated picture in docs/architecture.md: which room imports which.

`.venv/bin/python -m tests.support.architecture` writes it into the page.
"""

from collections.abc import Iterable

from tests.support import ROOT
from tests.support.rooms import FILES, ROOMS, find_imports

PAGE = ROOT / "docs" / "architecture.md"


def fill_page(text: str) -> str:
    before, mark, rest = text.partition("<!-- picture -->\n")
    _, end, behind = rest.partition("<!-- end -->")
    if not mark or not end:
        raise ValueError(f"{PAGE.name} has no place for the picture")
    return f"{before}{mark}\n{draw_imports()}\n\n{end}{behind}"


def draw_imports() -> str:
    """A Mermaid graph of the rooms' imports, without those that follow from others."""
    imports: dict[str, set[str]] = {room: set() for room in ROOMS}
    for name, file in FILES.items():
        room = name.split("/")[0]
        if room in imports:
            imports[room] |= {target.split("/")[0] for target in find_imports(file.read_text())} & {
                *ROOMS
            } - {room}
    edges = [
        f"    {room} --> {target}"
        for room in reversed(ROOMS)
        for target in _list_nearest(imports, imports[room])
    ]
    return "\n".join(["```mermaid", "flowchart TD", *edges, "```"])


def _list_nearest(imports: dict[str, set[str]], targets: Iterable[str]) -> list[str]:
    chosen = set(targets)
    return sorted(room for room in chosen if not any(room in imports[other] for other in chosen))


if __name__ == "__main__":
    PAGE.write_text(fill_page(PAGE.read_text()))
