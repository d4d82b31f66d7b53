"""What the README shows is what a reader gets."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from extproc.cli import main
from extproc.decision import Action, Outcome, loop_message
from extproc.metrics import Metrics
from extproc.policy.bundle import LoopDetection
from extproc.policy.loader import parse

README = Path(__file__).parent.parent / "README.md"


def test_explain_prints_what_the_readme_shows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first policy of the README's explain example is printed to the letter."""
    monkeypatch.chdir(README.parent)
    shown = re.search(r"explain --policy.*?\n(policy .*?)```", README.read_text(), re.DOTALL)
    assert shown is not None

    arguments = ["--policy", "envoy/policy.json", "-X", "POST", "-H", "x-user-id: ann", "-d", '{"a": 1}']
    main(["explain", *arguments, "http://localhost/v1/chat/completions?b=2&a=1"])

    assert capsys.readouterr().out.startswith(shown[1])


def test_the_sample_bundle_is_good() -> None:
    """The README's bundle loads without a warning."""
    shown = re.search(r"```json\n(.*?)```", README.read_text(), re.DOTALL)
    assert shown is not None

    loaded = parse({"README.md": json.dumps(json.loads(shown[1])).encode()}, datetime.now(UTC))

    assert not loaded.warnings
    assert not loaded.unenforced


def test_the_refusal_reads_as_shown() -> None:
    """The message of the README's example is that of a sixth request sent at once."""
    sixth = Outcome("p", "enforce", Action.REJECT, "0d8562cd", "", 6, 40, 60, 0, 60, 429)

    assert loop_message(sixth, "POST", "/v1/chat/completions") in README.read_text()


def test_every_key_and_metric_is_documented() -> None:
    """Each loop_detection key and each metric stands in the README."""
    text = README.read_text()

    names = [*LoopDetection.model_fields, *(metric.name for metric in Metrics().registry.collect())]
    assert [name for name in names if name not in text] == []
