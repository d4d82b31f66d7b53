"""The session limits that `scan --limits` recommends."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.scan.limits import Total, recommend_limits
from extproc.policy.presets import find_preset
from tests.support import ROOT
from tests.support.command import Run

HUNDRED = [
    Total(steps=n, tokens=n, nanos=n * 10**9, agents=0, tools=Counter(read=n))
    for n in range(1, 101)
]


@pytest.mark.parametrize(
    ("totals", "limits", "stopped"),
    [
        ([], {}, 0),
        ([Total(looped=True, steps=90)], {}, 0),
        ([Total(steps=3, nanos=None)], {"max_steps": 3}, 0),
        ([Total(steps=3, nanos=1)], {"max_steps": 3, "max_cost_per_session": 0.01}, 0),
        (
            [Total(steps=3, agents=2), Total(steps=1, agents=0)],
            {"max_steps": 3, "max_agents": 2},
            0,
        ),
        ([Total(steps=3), Total(steps=1), Total(steps=2)], {"max_steps": 3}, 0),
        (
            [*HUNDRED, Total(looped=True, steps=900, nanos=10**12)],
            {
                "max_steps": 99,
                "max_tool_calls": 99,
                "max_calls_per_tool": {"read": 99},
                "max_cost_per_session": 99.0,
            },
            1,
        ),
    ],
)
def test_limits_stop_one_percent_without_loops(
    totals: list[Total], limits: dict[str, Any], stopped: int
) -> None:
    found = recommend_limits(totals)

    assert (found["session_limits"], found["stopped"]) == (limits, stopped)


@pytest.mark.slow
def test_printed_limits_are_valid_in_a_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(capsys, "scan", "--limits", str(ROOT / "examples" / "transcripts"))
    limits = json.loads(run.out[run.out.rindex('{\n  "session_limits"') :])["session_limits"]
    assert limits.keys() >= {"max_steps", "max_tool_calls", "max_calls_per_tool"}
    policy = json.loads(Path(find_preset("sessions")).read_text())
    policy["spec"]["session_limits"] = limits | {"unknown_model": {"input": 15, "output": 75}}
    (tmp_path / "p.json").write_text(json.dumps(policy))

    assert Run(capsys, "validate", str(tmp_path / "p.json")).code == 0
