"""`loopguard tune --budgets`: what callers need is what a store would have let through, and the advice follows from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.budgets.guard import BudgetLimit
from extproc.cli.main import main
from extproc.cli.replay.spending import Spending
from extproc.decision import Reason
from extproc.store.rules.budget import BUCKET, PERIOD, UNUSED, Take, advance, apply, check
from tests.support.documents import bundle, policy
from tests.support.engine import ANY
from tests.support.recorded import Recorder

START = 1_763_812_345
RULES: list[dict[str, Any]] = [
    {
        "name": "tokens",
        "limit_keys": ["header:x-user-id"],
        "algorithm": "token_bucket_llm",
        "algorithm_config": {"tokens_per_minute": 600, "tokens_per_day": 700, "default_max_completion": 10},
    },
    {
        "name": "dollars",
        "limit_keys": ["header:x-user-id"],
        "algorithm": "cost_based",
        "algorithm_config": {
            "budget": 1,
            "period": "1h",
            "cost_key": "usage:dollars",
            "unknown_model": {"input": 1_000, "output": 1_000},
            "staged_actions": [{"threshold_percent": 50, "action": "reject"}, {"threshold_percent": 100, "action": "reject"}],
        },
    },
]


def lets_all_through(kind: int, size: int, events: list[tuple[int, int]], rate: int, span: int) -> bool:
    """Whether a budget of this size has room for every request."""
    state, now = UNUSED, START * 1_000
    for after, amount in events:
        now += after
        take = Take("k", kind, amount, size, rate, span)
        state, taken = check(advance(state, take, now), take, now)
        if not taken.fits:
            return False
        state = apply(state, take, taken)
    return True


@given(
    st.sampled_from([BUCKET, PERIOD]),
    st.lists(st.tuples(st.integers(0, 90_000), st.integers(1, 5_000)), min_size=1, max_size=30),
    st.integers(1, 3),
)
def test_a_caller_needs_what_a_store_lets_through(kind: int, events: list[tuple[int, int]], rate: int) -> None:
    """A budget of that size refuses nothing, and a smaller one does."""
    limit = BudgetLimit("b", kind, 1, 1, Reason.BUDGET_EXCEEDED, "a minute", "", rate=rate, span=60_000)
    spending, now = Spending(), START * 1_000
    for after, amount in events:
        now += after
        spending.add(limit, amount, amount, now)

    assert lets_all_through(kind, spending.most, events, rate, 60_000)
    assert not lets_all_through(kind, spending.most - 1, events, rate, 60_000)


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """A folder with a policy and a log: user n makes n requests of 100 tokens at once, and one a day later.

    Without bodies, a reservation of dollars has 1,000 tokens for the answer.
    """
    made: dict[str, Any] = {"id": "p", "spec": {"selector": ANY, "mode": "shadow", "rules": RULES}}
    recorder = Recorder(made)
    times = []
    for day in (0, 1):
        for user in range(1, 21):
            for _ in range(1 if day else user):
                recorder.send({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}, x_user_id=f"u{user}")
                times.append(START + day * 86_400)
    lines = []
    for line, time in zip(recorder.lines, times, strict=True):
        entry = json.loads(line)
        entry["loop_record"]["time"] = time
        lines.append(json.dumps({**entry, "loop_usage": {"input": 60, "output": 40}, "status": 200}))
    (tmp_path / "policies.json").write_text(json.dumps(bundle(made | {"spec": {**made["spec"], "mode": "enforce"}})))
    (tmp_path / "access.log").write_text("\n".join(lines) + "\n")
    return tmp_path


def tune(folder: Path, *flags: str) -> int:
    """The exit code of the command."""
    return main(["tune", "--policy", str(folder / "policies.json"), *flags, str(folder / "access.log")])


def test_budgets_are_percentiles_of_callers(logged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the policy's own budgets are; a bucket holds at least what flows in, and a stage that rejects early counts."""
    code = tune(logged, "--budgets", "--percentile", "90", "--json", "--output", str(logged / "tuned.json"))
    found, ready = json.loads(capsys.readouterr().out), json.loads((logged / "tuned.json").read_text())

    assert code == 0
    assert (found["requests"], found["callers"], found["estimated"], found["problems"]) == (230, 20, 0, [])
    assert found["recommendation"] == {
        "tokens": {"burst_tokens": 1_800, "tokens_per_day": 1_800}, "dollars": {"budget": 5.5},
    }  # fmt: skip
    assert {row["budget"]: row["callers_beyond"] for row in found["budgets"]} == {
        "burst_tokens of tokens": 2, "tokens_per_day of tokens": 2, "budget of dollars": 2,
    }  # fmt: skip
    configs = [rule["algorithm_config"] for rule in ready["spec"]["rules"]]
    assert configs[0] == RULES[0]["algorithm_config"] | {"tokens_per_day": 1_800, "burst_tokens": 1_800}
    assert main(["validate", str(logged / "tuned.json")]) == 0


def test_people_read_why(logged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each budget with the percentiles that it follows from, and a warning about little traffic."""
    assert tune(logged, "--budgets") == 0
    out = capsys.readouterr().out

    assert "20 callers. What callers need of each budget" in out
    assert ("- burst_tokens of tokens 2,000: 99% of 20 callers need a burst of at most 2,000; 0 need more, up to 2,000") in out
    assert "- budget of dollars 5.9: 99% of 20 callers need at most 2.9" in out
    assert "results are more reliable from 100 callers" in out


def test_tokens_that_the_log_lacks_are_estimated(logged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That is said, whether the log has nothing about responses or only their sizes."""
    lines = [json.loads(line) for line in (logged / "access.log").read_text().splitlines()]
    for line in lines[:3]:
        del line["loop_usage"]
    del lines[0]["status"]
    (logged / "access.log").write_text("\n".join(map(json.dumps, lines)) + "\n")

    tune(logged, "--budgets", "--json")

    found = json.loads(capsys.readouterr().out)
    assert found["estimated"] == 3
    assert "3 requests have no tokens in the log and count as estimated" in found["reason"]


def test_a_policy_without_rules_has_no_budgets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That is said, and the log is not read."""
    (tmp_path / "policies.json").write_text(json.dumps(bundle(policy("p", ANY))))

    assert tune(tmp_path, "--budgets") == 2
    assert "p has no `rules` to tune" in capsys.readouterr().err
