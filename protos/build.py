"""Build hook: turns protos/*.proto into extproc/pb/ (never edited, never committed) at every build and install."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROTOS = Path(__file__).parent
PB = PROTOS.parent / "extproc" / "pb"


def generate() -> None:
    """Write `extproc/pb/`: one module and one type stub for each file in `protos/`.

    Raises:
        RuntimeError: protoc refused a file; its own message is on stderr.
    """
    import grpc_tools
    from grpc_tools import protoc

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    PB.mkdir(exist_ok=True)
    (PB / "__init__.py").write_text('"""Generated from protos/ by protos/build.py; never edited."""\n')
    files = sorted(f"extproc/pb/{path.name}" for path in PROTOS.glob("*.proto"))
    # The first -I maps the flat protos/ folder onto the import path of the generated modules.
    arguments = [
        f"-Iextproc/pb={PROTOS}",
        f"-I{well_known}",
        f"--python_out={PB.parents[1]}",
        f"--pyi_out={PB.parents[1]}",
    ]
    if protoc.main(["protoc", *arguments, *files]) != 0:
        raise RuntimeError("protoc failed: see its message above")


class ProtoBuildHook(BuildHookInterface[Any]):
    """What hatchling calls, for wheels and for editable installs alike."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate before any file is collected."""
        generate()
        build_data["artifacts"] += ["extproc/pb/*.py", "extproc/pb/*.pyi"]
