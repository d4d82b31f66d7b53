"""Loops, sessions and budgets show one cost: from the access log, else an estimate."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from extproc.cli.main import main
from extproc.ext_proc.access_log import read_message
from extproc.ext_proc.service import Service
from tests.support.budget_policies import REJECT, rule
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.envoy_logs import log
from tests.support.operated import Operated
from tests.support.orders import USER
from tests.support.service import ask, metadata_of
from tests.support.turn_writers import Did, as_chat

REQUESTS = 10
PRICES = {"*": {"input": 10, "output": 100}}
# Of an answer: 0.02 and 0.015 dollars.
TOLD = {"input": 2_000, "output": 150}

DAY: dict[str, Any] = {
    "budget": 50,
    "period": "1d",
    "cost_key": "usage:dollars",
    "prices": PRICES,
    "staged_actions": REJECT,
}
BUDGET = rule("cost_based", "day", USER["limit_keys"], **DAY)
LIMITS = {"session": {}, "session_limits": {"max_cost_per_session": 40.0, "prices": PRICES}}
LOOPS = policy("p", ANY, similarity="turns", action="steer", **USER)
WITH_BOTH = {"id": "p", "spec": {**LOOPS["spec"], **LIMITS, "rules": [BUDGET]}}
WITH_BUDGET = {"id": "p", "spec": {**LOOPS["spec"], "rules": [BUDGET]}}


def loop(
    number: int, *, log_on: Service | None, told: Mapping[str, int] | None, service: Service
) -> None:
    turns = [
        Did((("search", {"q": "x"}),), ("nothing found " * 40,), "", "again", n)
        for n in range(3 + number)
    ]
    content = json.dumps(as_chat(turns)).encode()
    answer = ask(service, content, x_user_id="ann", x_session_id="s")
    if log_on is not None:
        sessions = json.loads(metadata_of(answer)["sessions"])
        message = log({"told": told, "sessions": sessions, "sizes": (len(content), 4_000)})
        for entry in read_message(message)[0]:
            log_on.settle_entry(entry)
            log_on.settle_entry(entry)  # Envoy has sent it again


def read_costs(made: Operated, replica: int = 0) -> list[tuple[float, float]]:
    (row,) = made.ask("/loops", replica)["conversations"]
    assert (row["requests"], row["requests_sent_on"]) == (REQUESTS, REQUESTS)
    runs, budgets = (
        made.ask("/sessions", replica)["sessions"],
        made.ask("/budgets", replica)["budgets"],
    )
    return [
        (row["cost_sent_on_usd"], row["estimated_cost_usd"]),
        *[
            (
                run["actual_cost"] + run["reserved_cost"],
                run["estimated_cost"] + run["reserved_cost"],
            )
            for run in runs
        ],
        *[(budget["used"], budget["estimated"]) for budget in budgets],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("spec", [WITH_BOTH, WITH_BUDGET], ids=["sessions and budgets", "budgets"])
@pytest.mark.parametrize("told", [TOLD, None], ids=["usage", "no usage"])
@pytest.mark.parametrize("ends_on", [0, 1, None], ids=["here", "another replica", "no access log"])
def test_requests_have_one_price_in_all_views(
    spec: dict[str, Any],
    told: dict[str, int] | None,
    ends_on: int | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = Operated(spec, replicas=2)
    for number in range(REQUESTS):
        loop(
            number,
            log_on=None if ends_on is None else made.services[ends_on],
            told=told,
            service=made.service,
        )

    known = ends_on is not None and told is not None
    for replica in (0, 1):
        costs = read_costs(made, replica)
        assert len(costs) == 3 - (spec is WITH_BUDGET)
        for cost, estimated in costs:
            assert cost == pytest.approx(0.35 if known else costs[0][0], abs=1e-4)
            assert estimated == pytest.approx(0 if known else cost, abs=1e-4)
    spent = f"{'' if known else '~'}${costs[0][0]:.2f}"
    assert f"<b>{spent}</b></li>" in made.read()
    with made.listen() as address:
        assert main(["top", "--once", "--admin", address]) == 0
    assert f"spent {spent} on {REQUESTS} requests" in capsys.readouterr().out


def test_price_flag_applies_to_loops_alone() -> None:
    made = Operated(WITH_BOTH, price=1_000.0)
    for number in range(REQUESTS):
        loop(number, log_on=made.service, told=TOLD, service=made.service)

    assert read_costs(made)[0] == (20.0, 20.0)
    assert (
        made.ask("/loops")["conversations"][0]["input_tokens_sent_on"] == REQUESTS * TOLD["input"]
    )
