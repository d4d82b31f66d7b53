"""Each rule stands in two languages; `tests/doors/store/rules` drives both with the same cases."""

import re

import pytest

from extproc.store.rules import read_script
from tests.support import ROOT

RULES = ROOT / "extproc" / "store" / "rules"
SCRIPTS = sorted(path.stem for path in RULES.glob("*.lua"))
PACKED = {
    "tally": ["FORMAT"],
    "back_to_back": ["FORMAT"],
    "ring": ["HEAD"],
    "chain": ["HEAD", "USAGE"],
    "session": ["HEAD", "BEGUN"],
    "tree": ["TREE_HEAD"],
    "budget": ["SHORT"],
}
"""The formats of what is kept as one packed value."""


def test_every_rule_has_python_and_lua() -> None:
    """`windows` has two scripts, and `roots` asks `root` for many agents."""
    rules = {path.stem for path in RULES.glob("*.py")} - {"__init__"}
    assert sorted(rules - {"windows"} | {"tally", "sliding_log", "roots"}) == SCRIPTS
    assert "windows" in rules


@pytest.mark.parametrize("rule", PACKED)
def test_packed_values_begin_with_a_byte_for_the_version(rule: str) -> None:
    text = read_script(rule)
    for name in PACKED[rule]:
        assert re.search(rf"local {name}(, \w+)* = '>B", text)
        assert re.findall(rf"struct\.pack\({name}, (\w+)", text)[0].endswith("VERSION")
