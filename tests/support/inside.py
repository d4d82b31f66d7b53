"""What tests know of the inside of the package: these lists only shrink.

.venv/bin/python -m tests.support.inside            prints both as the tests are now
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterable

from tests.support import ROOT
from tests.support.rooms import list_imports

IMPORTED = {
    "": """
        apis bounded build decision detectors errors logs metrics objects options pb reload server settings sockets
        store
    """,
    "apis": """
        api bedrock contents conversation excerpt json_rpc lengths messages places usage
    """,
    "budgets": """
        commands costs
    """,
    "cli": """
        commands loop_screen main packed probe
    """,
    "cli/commands": """
        dashboards grant ordering serve sessions top
    """,
    "cli/envoy_check": """
        checks config document inspect needs paths show
    """,
    "cli/envoy_check/checks": """
        callers
    """,
    "cli/envoy_config": """
        options render snippet template usage
    """,
    "cli/replay": """
        command counts judge logs records table
    """,
    "cli/scan": """
        atif files formats limits lines page report trajectories transcripts watch work
    """,
    "detectors": """
        actions alike arguments base canonical causes chain complaints failures keys loops nesting own_answers results
        schemas scratchpad similar_turns tail tool_calls tools turn turns
    """,
    "engine": """
        candidates engine evaluation handover orders plan ramp recording settlements
    """,
    "ext_proc": """
        access_log budget duplex protobuf service stream throttle transaction upload wire
    """,
    "ext_proc/answers": """
        go_on metadata
    """,
    "ext_proc/changes": """
        changes edits narrow steer
    """,
    "operator": """
        after_notes agents board budget_events budget_rows conversation_rows coverage coverage_rows events incident_rows
        incident_table loop_rows overrides probes session_rows session_table sketch standing_orders table
    """,
    "operator/admin": """
        budget_report canary_page client coverage_report credentials html local_token loop_page loop_report overrides
        pages reports row_commands row_states run_report server session_report
    """,
    "operator/canary": """
        pairs report sharing states verdict
    """,
    "policy": """
        bundle files last_good loader namespaces outline overlaps pairings presets
    """,
    "request": """
        callers document encodings fingerprint hash_key http limit_keys notes patch quoting secrets
    """,
    "sessions": """
        changing history limits names prices rates session_limits
    """,
    "store": """
        backend care client credentials key_sharing known_refusals link memory pending pushes redis remote
        remote_documents replicas resp rules scripts side_connections topology
    """,
    "store/rules": """
        budget chain documents ring root session take_back tree windows
    """,
    "transport": """
        acceptor fast grpc grpcio headers health http2 tls
    """,
}
"""Modules of the package that tests may import, by folder."""

READERS = {
    "tests/doors/ext_proc/test_access_log.py": 1,
    "tests/doors/store/test_redis.py": 27,
    "tests/doors/transport/test_acceptor.py": 19,
    "tests/doors/transport/test_door.py": 9,
    "tests/doors/transport/test_honest_envoy.py": 1,
    "tests/doors/transport/test_tls.py": 7,
    "tests/support/operated.py": 1,
    "tests/unit/apis/test_known.py": 7,
    "tests/unit/budgets/test_budget_guard.py": 1,
    "tests/unit/cli/scan/test_watch.py": 2,
    "tests/unit/cli/test_completion.py": 3,
    "tests/unit/cli/test_terminal.py": 3,
    "tests/unit/detectors/test_detectors.py": 4,
    "tests/unit/detectors/test_failures.py": 25,
    "tests/unit/detectors/test_moving_numbers.py": 5,
    "tests/unit/detectors/test_results.py": 6,
    "tests/unit/detectors/test_turns_memory.py": 13,
    "tests/unit/engine/test_engine.py": 1,
    "tests/unit/engine/test_handover.py": 1,
    "tests/unit/engine/test_isolation.py": 1,
    "tests/unit/engine/test_ramp.py": 1,
    "tests/unit/engine/test_routes.py": 5,
    "tests/unit/ext_proc/test_edits.py": 1,
    "tests/unit/ext_proc/test_narrow_sdks.py": 1,
    "tests/unit/ext_proc/test_small_words.py": 1,
    "tests/unit/ext_proc/test_unreadable_bodies.py": 1,
    "tests/unit/ext_proc/test_wire.py": 10,
    "tests/unit/operator/test_admin.py": 21,
    "tests/unit/operator/test_canary.py": 2,
    "tests/unit/operator/test_conversations.py": 1,
    "tests/unit/operator/test_events.py": 4,
    "tests/unit/operator/test_incidents.py": 2,
    "tests/unit/operator/test_overrides.py": 1,
    "tests/unit/operator/test_table.py": 2,
    "tests/unit/request/test_notes.py": 2,
    "tests/unit/sessions/test_history.py": 11,
    "tests/unit/sessions/test_rates.py": 1,
    "tests/unit/store/test_chains.py": 3,
    "tests/unit/store/test_ledger.py": 1,
    "tests/unit/store/test_memory.py": 5,
    "tests/unit/store/test_session_calls.py": 2,
    "tests/unit/store/test_urls.py": 1,
    "tests/unit/test_bounded.py": 4,
    "tests/unit/test_reload.py": 4,
    "tests/unit/transport/test_headers.py": 2,
    "tests/unit/transport/test_http2_bounds.py": 8,
}
"""How many private attributes a file still reads, sets or imports."""

FIELDS = ("_replace", "_asdict", "_fields")
"""Of NamedTuples, where they are public."""

_PRIVATE = re.compile(r"_[^_]")
_BY_NAME = {"setattr", "getattr", "delattr", "hasattr"}


def read_tests() -> dict[str, ast.Module]:
    """All files below tests/, by their paths."""
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted((ROOT / "tests").rglob("*.py"))}


def _is_private(name: object) -> bool:
    return isinstance(name, str) and bool(_PRIVATE.match(name)) and name not in FIELDS


def _find_private(node: ast.AST) -> int:
    match node:
        case ast.Attribute(ast.Name("self" | "cls") | ast.Call(ast.Name("super"))):
            return 0
        case ast.Attribute(attr=name):
            return _is_private(name)
        case ast.Call(ast.Name(called) | ast.Attribute(attr=called), arguments) if called in _BY_NAME:
            return sum(isinstance(each, ast.Constant) and _is_private(each.value) for each in arguments[:2])
        case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "extproc":
            return sum(_is_private(alias.name) for alias in names)
    return 0


def count_private(tree: ast.Module) -> int:
    """How often a file reads, sets or imports what is private to something else."""
    return sum(map(_find_private, ast.walk(tree)))


def find_imported(tree: ast.Module) -> set[str]:
    """The modules of the package that a file imports."""
    return {*list_imports(tree)}


def find_test_imports(tree: ast.Module) -> list[str]:
    """What a file imports of test modules."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.startswith("tests.") and ".test_" in name]


def write_lists(modules: Iterable[str], readers: dict[str, int]) -> str:
    """Both lists as they stand in this file."""
    rooms: dict[str, list[str]] = {}
    for module in sorted(modules):
        room, _, name = module.rpartition("/")
        rooms.setdefault(room, []).append(name)
    lines = ["IMPORTED = {"]
    for room, names in sorted(rooms.items()):
        folded = textwrap.fill(" ".join(names), 120, initial_indent=" " * 8, subsequent_indent=" " * 8)
        lines += [f'    "{room}": """', folded, '    """,']
    lines += ["}", '"""Modules of the package that tests may import, by folder."""', "", "READERS = {"]
    lines += [f'    "{path}": {number},' for path, number in readers.items()]
    return "\n".join([*lines, "}", '"""How many private attributes a file still reads, sets or imports."""', ""])


if __name__ == "__main__":
    files = read_tests()
    private = {path: number for path, tree in files.items() if (number := count_private(tree))}
    sys.stdout.write(write_lists(set().union(*map(find_imported, files.values())), private))
