"""What the README shows is what a reader gets."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from extproc.cli import main
from extproc.decision import Action, Outcome, Repeat
from extproc.metrics import Metrics
from extproc.policy.bundle import LoopDetection, Spec
from extproc.policy.loader import parse
from extproc.similarity import make_similarity
from extproc.similarity.keys import Tool

README = Path(__file__).parent.parent / "README.md"


def test_explain_prints_what_the_readme_shows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first policy of the README's explain example is printed to the letter."""
    monkeypatch.chdir(README.parent)
    shown = re.search(r"explain --policy.*?\n(policy .*?)```", README.read_text(), re.DOTALL)
    assert shown is not None

    arguments = ["--policy", "envoy/policy.json", "-X", "POST", "-H", "x-user-id: ann", "-d", '{"a": 1}']
    main(["explain", *arguments, "http://localhost/v1/chat/completions?b=2&a=1"])

    assert capsys.readouterr().out.startswith(shown[1])


def test_the_sample_policies_are_good() -> None:
    """Every policy file that the README shows loads without a warning."""
    shown = re.findall(r"```json\n(.*?)```", README.read_text(), re.DOTALL)

    loaded = parse({f"sample {number}": text.encode() for number, text in enumerate(shown)}, datetime.now(UTC))

    assert len(shown) == 2
    assert not loaded.warnings
    assert not loaded.unenforced


def test_the_refusal_reads_as_shown() -> None:
    """The message of the README's example is that of a sixth request sent at once."""
    exact = make_similarity(LoopDetection())
    sixth = Outcome("p", "enforce", Action.REJECT, "0d8562cd", "", 6, 40, 60, 0, 60, 429, "default", exact)

    assert exact.tell(sixth, "POST", "/v1/chat/completions") in README.read_text()


def test_the_refusal_of_tool_calls_reads_as_shown() -> None:
    """The message about a tool is that of three equal calls."""
    repeat = Repeat(("read_file",), 3, 3, 3, results=True)
    calls = make_similarity(LoopDetection(similarity="tool_calls"))
    third = Outcome("p", "enforce", Action.REJECT, "0d8562cd", "", 3, 0, 0, 0, None, 429, "default", calls, repeat)

    assert calls.tell(third, "POST", "/v1/chat/completions") in README.read_text()


def test_every_key_and_metric_is_documented() -> None:
    """Each key of a policy and each metric stands in the README."""
    text = README.read_text()

    names = [
        *Spec.model_fields,
        *LoopDetection.model_fields,
        *Tool.model_fields,
        *(metric.name for metric in Metrics().registry.collect()),
    ]
    assert [name for name in names if name not in text] == []
