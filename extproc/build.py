"""Whether this process runs the compiled build or the plain sources."""
# interpreted: read at start; it looks at how another module was imported

from typing import Final

from extproc import bounded

BUILD: Final = "pure Python" if bounded.__file__.endswith(".py") else "compiled"


def describe_build(build: str = BUILD) -> str:
    """The build; for plain sources also the gain from compiling them (see docs/performance.md)."""
    return (
        build
        if build == "compiled"
        else f"{build}; installed with LOOPGUARD_COMPILED=1, it takes a third of the CPU"
    )
