"""Modules of the package that tests import.

`.venv/bin/python -m tests.support.inside` prints the list as it is now.
"""

import ast
import re
import sys
import textwrap
from collections.abc import Iterable

from tests.support import ROOT
from tests.support.rooms import list_imports

IMPORTED = {
    "": """
        apis bounded build calendar decision detectors errors logs memory metrics objects options pb
        reload server settings sockets store
    """,
    "apis": """
        api bedrock contents conversation excerpt json_rpc lengths locate messages places usage
    """,
    "budgets": """
        commands costs
    """,
    "cli": """
        commands loop_screen main packed probe tables
    """,
    "cli/commands": """
        dashboards grant ordering serve sessions top
    """,
    "cli/envoy_check": """
        config document inspect needs paths
    """,
    "cli/envoy_check/checks": """
        callers
    """,
    "cli/envoy_config": """
        options render snippet template usage
    """,
    "cli/replay": """
        command judge records report
    """,
    "cli/scan": """
        atif files formats limits report transcripts watch work
    """,
    "detectors": """
        actions alike arguments base canonical causes chain failures history keys loops own_answers
        results schemas tail tool_calls tools turn turns
    """,
    "engine": """
        engine entries exchange guards handover orders plan ramp recording settlements
    """,
    "ext_proc": """
        access_log budget duplex judging service stream upload wire
    """,
    "ext_proc/answers": """
        let_pass metadata
    """,
    "ext_proc/changes": """
        changes edits narrow steer
    """,
    "operator": """
        after_notes board budget_rows coverage coverage_rows events incident_table loop_rows
        overrides probes row_events session_rows session_table sketch standing_orders table
    """,
    "operator/admin": """
        budget_report canary_page client commands coverage_report credentials local_token loop_page
        loop_report order_page overrides pages reports row_commands row_states run_report server
        session_report sign_in
    """,
    "operator/canary": """
        pairs report sharing states verdict
    """,
    "policy": """
        bundle files last_good loader namespaces outline overlaps pairings presets
    """,
    "request": """
        document encodings fingerprint hash_key http limit_keys notes patch quoting secrets
    """,
    "sessions": """
        changing history names rates session_limits
    """,
    "store": """
        backend care client credentials key_sharing known_refusals link memory pending pushes redis
        remote replicas rules scripts shard side_connections topology
    """,
    "store/rules": """
        back_to_back budget chain documents ring root session take_back tree windows
    """,
    "transport": """
        acceptor fast grpc grpcio headers health http2 tls
    """,
}

_PRIVATE = re.compile(r"_[^_]")
_BY_NAME = {"setattr", "getattr", "delattr", "hasattr"}


def read_tests() -> dict[str, ast.Module]:
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
        for path in sorted((ROOT / "tests").rglob("*.py"))
    }


def _is_private(name: object) -> bool:
    return isinstance(name, str) and bool(_PRIVATE.match(name))


def _find_private(node: ast.AST) -> int:
    match node:
        case ast.Call(ast.Name(called) | ast.Attribute(attr=called), arguments) if (
            called in _BY_NAME
        ):
            return sum(
                isinstance(each, ast.Constant) and _is_private(each.value) for each in arguments[:2]
            )
        case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "extproc":
            return sum(_is_private(alias.name) for alias in names)
    return 0


def count_private(tree: ast.Module) -> int:
    return sum(map(_find_private, ast.walk(tree)))


def find_imported(tree: ast.Module) -> set[str]:
    return {*list_imports(tree)}


def find_test_imports(tree: ast.Module) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.startswith("tests.") and ".test_" in name]


def write_list(modules: Iterable[str]) -> str:
    rooms: dict[str, list[str]] = {}
    for module in sorted(modules):
        room, _, name = module.rpartition("/")
        rooms.setdefault(room, []).append(name)
    lines = ["IMPORTED = {"]
    for room, names in sorted(rooms.items()):
        folded = textwrap.fill(
            " ".join(names), 100, initial_indent=" " * 8, subsequent_indent=" " * 8
        )
        lines += [f'    "{room}": """', folded, '    """,']
    return "\n".join([*lines, "}", ""])


if __name__ == "__main__":
    sys.stdout.write(write_list(set().union(*map(find_imported, read_tests().values()))))
