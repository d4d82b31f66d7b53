"""Build hook: generates extproc/pb/ from protos/, and compiles modules of requests with mypyc.

- A module is compiled unless a comment below its docstring, or in its folder's `__init__.py`, gives
  a reason not to.
- Only wheels are compiled, and only with LOOPGUARD_COMPILED=1. Any other install is plain Python
  and takes seconds.
- The sources are the same in both builds, and only extproc/pb/ is written next to them.
- mypyc runs in its own process, because it exits on errors, and compilers write to stdout.

Compiled code relies on types and resolves names early. Compiled modules follow these rules, which
no type checker knows; tests on the compiled wheel find violations:

- Annotations of classes are evaluated: import their names at run time, and mark class variables as
  ClassVar.
- A variable has one type in its function: use two names for two exceptions.
- Values must have their declared types: asyncio.gather returns a list, whatever its stub says; a
  test double needs a Protocol.
- Methods of compiled classes cannot be replaced, and interpreted classes cannot inherit from them.
- Classes that pydantic or msgspec build from annotations belong in interpreted modules.
- Never recurse over client input: the depth of the stack is not checked.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING, Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if TYPE_CHECKING:
    from setuptools import Extension

ROOT = Path(__file__).parent
PROTOS = ROOT / "protos"
PACKAGE = ROOT / "extproc"
PB = PACKAGE / "pb"

COMPILERS = ["mypy==2.4.1", "setuptools>=77"]

INTERPRETED = re.compile(r"^# interpreted(, with all below)?: \S", re.MULTILINE)
"""The comment of a module that is not compiled, with the reason."""

INTERPRETED_BELOW = re.compile(r"^# interpreted, with all below: \S", re.MULTILINE)
"""The same comment in an `__init__.py`, for the whole folder."""

_PROBE = "#include <Python.h>\nPyObject *PyInit_probe(void) { return NULL; }\n"


_FLAGS = ["-fvisibility=hidden", "-fno-plt"]
"""Flags for small code and direct calls: a request runs more code than the first-level cache holds.

-O1 compiles in two thirds of the time of -O2 and is as fast, because most of the code calls
Python's functions.
"""

_GCC_FLAGS = ["-fpeephole2", "-freorder-blocks-and-partition"]
"""Flags of gcc alone: change reference counts in memory, and separate rarely run code (_COLD)."""

_COLD = """#include <Python.h>
__attribute__((cold)) void CPy_AddTraceback(const char *, const char *, int, PyObject *);
__attribute__((cold)) void CPy_AttributeError(
    const char *, const char *, const char *, const char *, int, PyObject *);
__attribute__((cold)) void CPy_TypeError(const char *, PyObject *);
__attribute__((cold)) void CPy_TypeErrorTraceback(
    const char *, const char *, int, PyObject *, const char *, PyObject *);
__attribute__((cold)) void CPyError_OutOfMemory(void);
__attribute__((cold)) void CPyTagged_IncRef(size_t);
__attribute__((cold)) void CPyTagged_DecRef(size_t);
__attribute__((cold)) void CPyTagged_XDecRef(size_t);
__attribute__((cold)) void PyErr_SetString(PyObject *, const char *);
"""
"""Functions that mypyc's code calls only after errors, or for integers above 62 bits.

gcc separates the code that leads to such calls, two fifths of the total.
"""


_GROUP = "extproc"
_NATIVE = "__native_"
"""Prefix of mypyc's C files with the code of modules; the others only load them."""

_UNITS = 24
"""Number of C files to compile. Each compiles all inline functions of Python and mypyc again.

It is fixed so that builds on different machines are equal.
"""

_TOP_LEVEL = re.compile(r"\bCPyDef_\w+_____top_level__\b")
"""Functions that run once, at import, and are not optimized: a quarter of all C."""


class BuildHook(BuildHookInterface[Any]):
    """The hook for wheels and editable installs."""

    def dependencies(self) -> list[str]:
        """Build requirements in addition to those of pyproject.toml."""
        return COMPILERS if self._compiles() else []

    def _compiles(self) -> bool:
        return self.target_name == "wheel" and os.environ.get("LOOPGUARD_COMPILED", "0") not in (
            "",
            "0",
        )

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate files before hatchling collects them."""
        generate_protos()
        build_data["artifacts"] += ["extproc/pb/*.py", "extproc/pb/*.pyi"]
        if version == "standard" and self._compiles():
            self._compile(build_data)

    def _compile(self, build_data: dict[str, Any]) -> None:
        self._folder = TemporaryDirectory()  # must exist until the wheel is made
        folder = Path(self._folder.name)
        command = [sys.executable, __file__, str(folder), *select_modules()]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603  # ourselves
        if done.returncode:
            self.app.abort(
                f"{done.stdout}\nLoopguard is not compiled: see above. Without "
                "LOOPGUARD_COMPILED=1, it is plain Python."
            )
        for built in (folder / "lib").rglob("*.*"):
            build_data["force_include"][str(built)] = str(built.relative_to(folder / "lib"))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def generate_protos() -> None:
    """Write `extproc/pb/`: a module and a type stub for each file in `protos/`.

    Raises RuntimeError if protoc fails. Unchanged files are not written again, because another
    process may be reading them.
    """
    import grpc_tools
    from grpc_tools import protoc

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    files = sorted(f"extproc/pb/{path.name}" for path in PROTOS.glob("*.proto"))
    with TemporaryDirectory() as folder:
        # The first -I maps the flat protos/ folder onto the import path of the generated modules.
        arguments = [
            f"-Iextproc/pb={PROTOS}",
            f"-I{well_known}",
            f"--python_out={folder}",
            f"--pyi_out={folder}",
        ]
        if protoc.main(["protoc", *arguments, *files]) != 0:
            raise RuntimeError("protoc failed: see its message above")
        made = Path(folder) / "extproc" / "pb"
        (made / "__init__.py").write_text(
            '"""Generated from protos/ by hatch_build.py; never edited."""\n'
        )
        PB.mkdir(exist_ok=True)
        for file in made.iterdir():
            if not (PB / file.name).exists() or (PB / file.name).read_bytes() != file.read_bytes():
                (PB / file.name).write_bytes(file.read_bytes())


def select_modules(package: Path = PACKAGE) -> list[str]:
    """The modules to compile, as paths in the project: all with code, except interpreted ones."""
    chosen = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        folders = [
            folder / "__init__.py"
            for folder in path.parents
            if folder != package and folder.is_relative_to(package)
        ]
        if (
            PB not in path.parents
            and not (path.name == "__init__.py" and not ast.parse(text).body[1:])
            and not INTERPRETED.search(text)
            and not any(
                INTERPRETED_BELOW.search(folder.read_text(encoding="utf-8")) for folder in folders
            )
        ):
            chosen.append(str(path.relative_to(package.parent)))
    return chosen


def compile_modules(folder: Path, modules: Sequence[str]) -> None:
    """Compile into `folder/lib`; without modules, only test the C compiler.

    Exits with a message if that fails.
    """
    from mypyc.build import mypycify
    from setuptools import Extension
    from setuptools.errors import BaseError, CCompilerError

    folder.mkdir(exist_ok=True)
    probe = folder / "probe.c"
    probe.write_text(_PROBE)

    def try_flags(flags: list[str]) -> None:
        _build([Extension("probe", [str(probe)], extra_compile_args=flags)], folder / "probe")

    flags = [*_FLAGS, *_GCC_FLAGS]
    try:
        try_flags(flags)
    except (BaseError, CCompilerError):
        flags = _FLAGS
        try:
            try_flags(flags)
        except (BaseError, CCompilerError) as error:
            sys.exit(f"no C compiler works here, or Python's headers are missing: {error}")
    if not modules:
        return
    _tell(f"translating {len(modules)} modules to C ...")
    # `make check` checks types, with mypy's settings and the dependencies. Both are ignored here,
    # so that the compiled code does not depend on installed packages.
    options = [
        "--config-file=",
        "--no-site-packages",
        "--ignore-missing-imports",
        "--follow-imports=silent",
    ]
    chosen, target = [*options, *modules], str(folder / "c")
    # Several C files take half the CPU time of one, and compile in parallel.
    extensions = mypycify(
        chosen,
        opt_level="1",
        debug_level="0",
        group_name=_GROUP,
        multi_file=True,
        target_dir=target,
    )
    for extension in extensions:
        extension.extra_compile_args += flags
        extension.sources = _join_sources(extension.sources, folder)
    _build(extensions, folder)


def _join_sources(sources: Sequence[str], folder: Path) -> list[str]:
    """Join the modules' C files into `_UNITS` files of about equal size, by including them."""
    natives = [Path(source) for source in sources if Path(source).name.startswith(_NATIVE)]
    units: list[list[Path]] = [[] for _ in range(min(_UNITS, len(natives)))]
    sizes = [0] * len(units)
    for native in sorted(natives, key=lambda path: (-path.stat().st_size, path.name)):
        smallest = sizes.index(min(sizes))
        units[smallest].append(native)
        sizes[smallest] += native.stat().st_size
    joined = [folder / "c" / f"{_NATIVE}unit_{number}.c" for number in range(len(units))]
    for path, unit in zip(joined, units, strict=True):
        path.write_text("".join(f'#include "{native.name}"\n' for native in unit))
    return [*map(str, joined), *(source for source in sources if Path(source) not in natives)]


def _tell(progress: str) -> None:
    """Print progress, also to the terminal: pip shows a build's output only with `--verbose`."""
    print(progress, file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        with suppress(OSError), Path("/dev/tty").open("w") as terminal:
            print(f"\r{progress}", file=terminal)


def _declare_top_levels(header: Path) -> str:
    """Declare the functions that run at import as cold and not optimized, for gcc."""
    names = (
        sorted(set(_TOP_LEVEL.findall(header.read_text(encoding="utf-8"))))
        if header.exists()
        else []
    )
    declared = "".join(
        f'__attribute__((cold, optimize("O0"))) char {name}(void);\n' for name in names
    )
    return f"#if !defined(__clang__)\n{declared}#endif\n"


def _build(extensions: list[Extension], folder: Path) -> None:
    """Build extensions into `folder/lib`, like a setup.py."""
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext
    from setuptools.errors import ExecError

    lock = Lock()
    total, done = sum(len(extension.sources) for extension in extensions), count(1)

    class Build(build_ext):  # type: ignore[misc]  # it has no types
        """Compiles the files of an extension in parallel, and their shared header once."""

        def build_extension(self, ext: Extension) -> None:
            def compile_one(source: str) -> list[str]:
                header = self._share(
                    f"{_NATIVE}internal_{_GROUP}.h"
                    if Path(source).name.startswith(_NATIVE)
                    else "Python.h",
                    ext,
                )
                made: list[str] = self.compiler.compile(
                    [source],
                    self.build_temp,
                    include_dirs=ext.include_dirs,
                    extra_postargs=[*ext.extra_compile_args, "-include", header],
                )
                if (number := next(done)) % 20 == 0:
                    _tell(f"compiling: {number} of {total} files ...")
                return made

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                ext.extra_objects = list(chain.from_iterable(pool.map(compile_one, ext.sources)))
            ext.sources = []
            super().build_extension(ext)

        def _share(self, name: str, ext: Extension) -> str:
            """Make a header to include first, precompiled for gcc; returns its path."""
            header = Path(self.build_temp).resolve() / f"shared_{name}"
            with lock:
                if not header.exists():
                    header.parent.mkdir(parents=True, exist_ok=True)
                    header.write_text(
                        f'{_COLD}{_declare_top_levels(folder / "c" / name)}#include "{name}"\n'
                    )
                    places = [
                        f"-I{place}" for place in (*self.compiler.include_dirs, *ext.include_dirs)
                    ]
                    command = [
                        *self.compiler.compiler_so,
                        *places,
                        *ext.extra_compile_args,
                        "-x",
                        "c-header",
                        str(header),
                    ]
                    with suppress(ExecError):  # without it, each file parses the header
                        self.compiler.spawn([*command, "-o", f"{header}.gch"])
            return str(header)

    command = Build(Distribution({"ext_modules": extensions}))
    command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "temp")
    command.ensure_finalized()
    command.parallel = os.cpu_count()  # for the many small files that load modules
    command.run()


if __name__ == "__main__":
    compile_modules(Path(sys.argv[1]), sys.argv[2:])
