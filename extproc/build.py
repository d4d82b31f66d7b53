"""Whether the compiled build runs, or the sources as they are."""
# interpreted: read at start; it asks how another module was imported

from typing import Final

from extproc import bounded

BUILD: Final = "pure Python" if bounded.__file__.endswith(".py") else "compiled"


def describe_build(build: str = BUILD) -> str:
    """The build, and for the sources what compiling them gains; docs/performance.md has the figures."""
    return build if build == "compiled" else f"{build}; installed with LOOPGUARD_COMPILED=1, it takes a third of the CPU"
