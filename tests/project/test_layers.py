"""The floors of the house: which file may import which."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from extproc.commands import COMMANDS
from tests.support import ROOT as CHECKOUT

ROOT = CHECKOUT / "extproc"

SHARED = [f"similarity/shapes/{name}" for name in ("messages", "contents", "places", "conversation")]
SHAPES = sorted(f"similarity/shapes/{file.stem}" for file in ROOT.glob("similarity/shapes/[!_]*.py"))
"""One file for each API, which nobody else names, above what they share."""

# From the ground up, every file by name; a folder's own name is its __init__.py. A file imports from lower floors and, on its
# own floor, from files of its own folder that stand before it: so no circle can hide.
FLOORS: list[list[str]] = [
    [
        "errors",
        "encodings",
        "protobuf",
        "hash_key",
        "quoting",
        "notes",
        "memo",
        "recent",
        "logs",
        "options",
        "rates",
        "model_names",
        "prices",
        "usage",
        "settings",
        "sketch",
        "tallies",
        "decision",
        "metrics",
        "fingerprint",
        "request",
        "windows",
        "ledger",
    ],
    ["policy", "policy/objects", "policy/session_limits", "policy/strict_json", "policy/splice", "policy/files"],
    ["similarity/document", "similarity/patch"],
    [*SHARED, *(name for name in SHAPES if name not in SHARED), "similarity/shapes"],
    ["similarity/actions", "similarity/history", "similarity/histories"],
    ["similarity/results", "similarity/tools", "similarity/turn"],
    ["similarity/keys", "similarity/base", "similarity/loops"],
    ["similarity/canonical", "similarity/tail", "similarity/tool_calls", "similarity/turns", "similarity/mcp", "similarity"],
    ["policy/bundle", "policy/routes", "policy/rules", "policy/shapes", "policy/messages", "policy/pairings", "policy/loader"],
    ["guards", "guards/kill_switch", "guards/loop", "guards/override", "guards/session_names", "guards/session"],
    ["ramp", "plan", "candidates", "evaluation", "engine", "recording", "handover"],
    [
        "store/orders",
        "store",
        "store/certain",
        "store/pending",
        "store/resp",
        "store/scripts",
        "store/shard",
        "store/boards",
        "store/link",
        "store/client",
        "store/credentials",
        "store/topology",
        "store/aside",
        "store/remote_boards",
        "store/remote_orders",
    ],
    ["store/remote", "store/redis", "store/memory"],
    ["wire", "duplex", "counting", "throttle", "budget", "upload", "loop_table", "session_table", "events"],
    [
        "answers/apis/api",
        *(f"answers/apis/{api}" for api in ("openai", "responses", "anthropic", "gemini", "bedrock", "ollama", "rpc")),
        "answers/apis",
    ],
    [
        "answers",
        "answers/clients",
        "answers/metadata",
        "answers/go_on",
        "answers/edits",
        "answers/narrow",
        "answers/refuse",
        "answers/steer",
    ],
    [
        "canary",
        *(f"canary/{name}" for name in ("samples", "pairs", "states", "verdict", "report", "review", "sharing")),
    ],
    ["access_log", "settlements", "reporting", "changes"],
    ["service"],
    ["overrides", "key_sharing"],
    ["transport", "transport/headers", "transport/http2", "transport/grpc", "transport/health", "transport/sockets"],
    ["transport/acceptor", "transport/tls"],
    ["transport/fast", "transport/grpcio"],
    [
        "admin",
        "admin/client",
        "admin/pages",
        "admin/credentials",
        "admin/overrides",
        "admin/board",
        "admin/loops",
        "admin/sessions",
        "admin/loop_report",
        "admin/session_report",
        "admin/loop_page",
        "admin/server",
    ],
    ["reload", "server"],
    ["envoy_config", "envoy_config/options", "envoy_config/routes", "envoy_config/template", "envoy_config/usage"],
    ["envoy_config/render", "envoy_config/snippet"],
    [
        "replay",
        *(f"replay/{name}" for name in ("records", "logs", "counts", "judge", "report", "table", "page", "tune", "command")),
    ],
    ["envoy_check", "envoy_check/document"],
    ["envoy_check/config", "envoy_check/findings", "envoy_check/needs"],
    ["envoy_check/selectors"],
    [
        *(
            f"envoy_check/checks/{name}"
            for name in ("answers", "callers", "clusters", "filters", "late", "limits", "paths", "routes")
        ),
    ],
    ["envoy_check/checks"],
    ["envoy_check/inspect", "envoy_check/show"],
    [
        "commands",
        "commands/ordering",
        *(f"commands/{name.replace('-', '_')}" for name in COMMANDS),
    ],
    ["cli"],
]
PLACE = {name: (floor, number) for floor, names in enumerate(FLOORS) for number, name in enumerate(names)}

GENERATED = "pb"
MAY_READ_PB = {
    "access_log",
    "service",
    "wire",
    "answers/go_on",
    "answers/refuse",
    "transport/fast",
    "transport/grpcio",
    "transport/health",
}

FILES = sorted(file for file in ROOT.rglob("*.py") if file.relative_to(ROOT).parts[0] not in {GENERATED, "__init__.py"})


def name_of(file: Path) -> str:
    """The floor plan's name for a file."""
    below = file.relative_to(ROOT)
    return str(below.parent if below.name == "__init__.py" else below.with_suffix(""))


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module of the package that is imported anywhere in a file, by the floor plan's name."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            # `from extproc.policy import rules` names a module, `from extproc.errors import X` a thing in one.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            below = name.split(".")
            if below[0] == "extproc" and below[1:]:
                yield below[1] if below[1] == GENERATED else module_of("/".join(below[1:]))


def module_of(name: str) -> str:
    """The module that a name stands for, or that it stands in."""
    return name if name in PLACE else name.rpartition("/")[0] or name


def may_import(name: str, target: str) -> bool:
    """Whether the rule lets one file import another."""
    if target == GENERATED:
        return name in MAY_READ_PB
    (floor, number), (other_floor, other_number) = PLACE[name], PLACE.get(target, (len(FLOORS), 0))
    return other_floor < floor or (other_floor == floor and folder_of(name) == folder_of(target) and other_number < number)


def folder_of(name: str) -> str:
    """The folder that a file is in; "" for the root folder."""
    return name if (ROOT / name).is_dir() else name.rpartition("/")[0]


def violations(name: str, source: str) -> list[str]:
    """What a file of the package imports against the rule."""
    return [f"{name} imports {target}" for target in sorted(set(imports(ast.parse(source)))) if not may_import(name, target)]


def test_every_file_has_one_place() -> None:
    """The floor plan names every file of the package once, and no other."""
    assert sorted(name for names in FLOORS for name in names) == sorted(map(name_of, FILES))


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_a_file_imports_from_lower_floors_or_its_own_folder(file: Path) -> None:
    """No file reaches up, across to another folder of its floor, or into generated code that is not its business."""
    assert violations(name_of(file), file.read_text()) == []


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("plan", "from extproc.engine import Engine", ["plan imports engine"]),
        ("engine", "from extproc.plan import Plan", []),
        ("store/memory", "import extproc.service", ["store/memory imports service"]),
        ("store/certain", "from extproc.store import remote", ["store/certain imports store/remote"]),
        ("store/remote", "from extproc.store.certain import Certain", []),
        ("store/remote", "from extproc.store import Store", []),
        ("store/remote", "from extproc.store import remote", ["store/remote imports store/remote"]),
        ("fingerprint", "from extproc.policy.files import read_files", ["fingerprint imports policy/files"]),
        ("policy/loader", "from extproc.guards.loop import Loop", ["policy/loader imports guards/loop"]),
        ("policy/loader", "from extproc.policy.bundle import Policy\nfrom extproc import errors", []),
        ("settings", "def f():\n    from extproc import cli", ["settings imports cli"]),
        ("settings", "from extproc.logs import LogFormat", []),
        ("settings", "from extproc import nowhere", ["settings imports nowhere"]),
        ("server", "from extproc.pb import base_pb2", ["server imports pb"]),
        ("transport/health", "from extproc.pb.health_pb2 import X\nfrom extproc.service import Service", []),
    ],
)
def test_the_rule_finds_what_breaks_it(name: str, source: str, expected: list[str]) -> None:
    """Imports of every form, at any depth, are held to the rule."""
    assert violations(name, source) == expected


def test_there_are_files_to_look_at() -> None:
    """The rule is not kept by looking at nothing."""
    assert {"engine.py", "cli.py", "loader.py", "memory.py", "grpcio.py"} <= {file.name for file in FILES}
