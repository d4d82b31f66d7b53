"""Replicas in processes of their own change the same state at once: nothing is lost, and nothing counts twice."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from extproc.errors import CONFLICT, StoreError
from extproc.metrics import Metrics
from extproc.settings import Settings
from extproc.store import open_store
from extproc.store.rules.chain import ChainLink
from extproc.store.rules.ring import Push
from tests.support.chains import Sent, make_link
from tests.support.harness import PATIENCE
from tests.support.servers import Driver, Server, altered, cluster, server
from tests.support.windows import make_push

REPLICAS, PUSHES = 4, 50
RUNS = 42
"""The place in a node's value of the number of conversations that stand there."""


@pytest.fixture(scope="module")
def one() -> Iterator[Server]:
    """One server."""
    with server() as made:
        yield made


def push_many(url: str, replica: int, kind: str) -> list[Any]:
    """What a replica asks at once, and is answered: fifty entries of one ring, or one request fifty times."""

    async def push() -> list[Any]:
        store = open_store(url, Metrics(), Settings(store_timeout=PATIENCE))
        await store.start()

        async def ask(number: int) -> Any:  # noqa: ANN401  # whatever the kind is answered
            digest = (replica * PUSHES + number).to_bytes(8)
            ring = Push("ring:00", digest, digest, REPLICAS * PUSHES, 600_000)
            answer = store.push([ring if kind == "ring" else make_link(Sent("u", (), ""))._replace(fresh=digest)])
            return (await answer if inspect.isawaitable(answer) else answer)[0]

        answers = await asyncio.gather(*map(ask, range(PUSHES)))
        await store.close()
        return answers

    return asyncio.run(push())


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    """A process for each replica."""
    with ProcessPoolExecutor(REPLICAS, multiprocessing.get_context("spawn")) as made:
        yield made


@pytest.fixture(scope="module", params=["valkey", "cluster"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server, or three."""
    if request.param == "valkey":
        with server() as one:
            yield f"redis://{one.address}"
    else:
        with cluster(replicas=False, fails_over=False) as nodes:
            yield f"redis+cluster://{nodes[0].address}"


def test_entries_of_four_replicas_all_stand(url: str, processes: ProcessPoolExecutor) -> None:
    """Two hundred pushes to one ring leave two hundred entries; each push has seen one more than another."""
    answers = [each.result() for each in [processes.submit(push_many, url, replica, "ring") for replica in range(REPLICAS)]]
    entries = [entries for each in answers for entries in each]

    assert sorted(map(len, entries)) == list(range(1, REPLICAS * PUSHES + 1))
    assert len({*max(entries, key=len)}) == REPLICAS * PUSHES


def test_equal_requests_of_four_replicas_each_count(processes: ProcessPoolExecutor) -> None:
    """Two hundred conversations that begin alike stand at one node, which counts them, and each has its own name."""
    with server() as one, one.client() as client:
        url = f"redis://{one.address}"
        answers = [each.result() for each in [processes.submit(push_many, url, replica, "link") for replica in range(REPLICAS)]]
        node = client.get(f"loopguard:{make_link(Sent('u', (), '')).key}")

    assert len({trail.name for each in answers for trail in each}) == REPLICAS * PUSHES
    assert node[RUNS] == REPLICAS * PUSHES


async def wait(driver: Driver, link: ChainLink) -> str:
    """What becomes of a question: nothing, or the kind of its error."""
    try:
        await driver.later(lambda store: store.push([link]))
    except StoreError as error:
        return error.kind
    return ""


def test_what_is_disturbed_all_the_time_is_given_up(one: Server) -> None:
    """After the store's timeout, and counted; nothing of it was written. The next one finds the server well."""

    def disturb(asked: bytes, answer: bytes) -> bytes:
        """Change what was read before it can be written."""
        if disturbs and b"chain2" in asked:
            with one.client() as client:
                client.set(f"loopguard:{link.key}", bytes([next(numbers)]) * 9)
        return answer

    numbers, disturbs, link = itertools.count(100), [True], make_link(Sent("u", (), ""))
    with altered(one, disturb) as front, Driver(f"redis://{front}", store_timeout=0.2) as driver:
        lost = driver.run(wait(driver, link))
        disturbs.clear()
        found = driver.run(wait(driver, link))

        assert (lost, found) == (CONFLICT, "")
        assert driver.metric("store_conflicts_total") == 1
        assert driver.store.health() == "ok"


def test_a_write_that_was_not_answered_is_not_tried_again(one: Server) -> None:
    """It may have counted: here, it has."""
    writes = []

    def swallow(asked: bytes, answer: bytes) -> bytes:
        """Answer what was read, but not what was written."""
        if b"chain2" in asked:
            writes.append(len(asked))
        return answer if len(writes) != 2 else answer[:1]

    link = make_link(Sent("once", (), ""))
    with altered(one, swallow) as front, Driver(f"redis://{front}", store_timeout=0.2) as driver:
        lost = driver.run(wait(driver, link))

        assert lost == "unavailable"
    assert len(writes) == 2
    assert one.client().get(f"loopguard:{link.key}")[RUNS] == 1


def test_questions_of_a_replica_share_a_read_and_a_write(one: Server) -> None:
    """Whatever is asked of one key in one moment; who has left is not counted."""
    with Driver(f"redis://{one.address}") as driver:
        pushes = [make_push(str(number), size=50)._replace(key="shared:00") for number in range(50)]

        async def together() -> list[int]:
            asked = [driver.store.push([pushed]) for pushed in pushes]
            asked[7].cancel()  # type: ignore[union-attr]  # it is pending
            return [len((await each)[0]) for place, each in enumerate(asked) if place != 7]  # type: ignore[misc]  # as above

        before = driver.metric("store_batch_size_count")
        assert driver.run(together()) == list(range(1, 50))
        assert driver.metric("store_batch_size_count") == before + 2
