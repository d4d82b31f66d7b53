"""Conversations under one caller through the script of a real server and of a cluster: each loop is found, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from tests.support.conversations import HABITS, Verdicts, interleave, judge, make_best_of, make_few, make_runs
from tests.support.extent import deepen
from tests.support.servers import Driver, cluster, server
from tests.support.service import make_service
from tests.support.sessions import agents


@pytest.fixture(scope="module")
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """A store on real servers."""
    if request.param == "valkey":
        with server() as one, Driver(f"redis://{one.address}") as made:
            yield made
    else:
        with (
            cluster(fails_over=False) as nodes,
            Driver("redis+cluster://" + ",".join(node.address for node in nodes[:2])) as made,
        ):
            yield made


# What an API's readers find is the same in front of every store, so each API meets one of them.
@pytest.mark.parametrize(
    ("driver", "api"),
    deepen(
        [
            ("valkey", "chat"),
            ("valkey", "responses"),
            ("cluster", "anthropic"),
            ("cluster", "gemini"),
            ("cluster", "text, react"),
        ],
        ("valkey", "chat"),
        ("cluster", "anthropic"),
    ),
    indirect=["driver"],
)
def test_every_loop_is_found_and_no_other(driver: Driver, api: str) -> None:
    """With whole histories, cleared results and windows of messages, all side by side."""
    random = Random(api)
    habits = ["whole, retries", "newest 2 results kept", "last 3 turns", "last 5 turns, no opening, retries"]
    if api == "gemini":  # its agents say nothing here: without the task too, nothing tells a request sent again from a turn
        habits.pop()
    runs = [
        run
        for habit in habits
        for run in [*make_runs(api, HABITS[habit], random), *make_best_of(4, api, HABITS[habit], random)]
    ]
    runs += make_few(4, "chat", HABITS["whole"], random)
    service, verdicts = make_service(agents(session=None), store=driver.store), Verdicts()

    async def main() -> None:
        for sent in interleave(runs, "random", random):
            verdicts.take(sent, refused=await judge(service, sent.data, x_user_id=api.replace(" ", "")))

    driver.run(main())

    assert verdicts.wrong == []
    assert [run in verdicts.refused for run in runs] == [run.loops for run in runs]
    assert driver.metric("store_errors_total") == 0
