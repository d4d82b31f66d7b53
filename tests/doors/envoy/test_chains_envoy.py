"""Conversations that send an API key and a body alone, through the real Envoy, two Loopguards and Valkey or a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random

import pytest

from tests.support.documents import bundle, policy
from tests.support.extent import deepen
from tests.support.harness import Stack, stack
from tests.support.servers import cluster, server
from tests.support.turn_writers import SHAPES, Did

LOOPS = policy("agents", {"pathPrefix": "/"}, similarity="turns", limit_keys=["header:x-user-id"])
STUCK = Did((("check", {"build": 7}),), ("the build is broken",))


@pytest.fixture(scope="module", params=[server, partial(cluster, fails_over=False)], ids=["valkey", "cluster"])
def stacked(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """Two replicas that share a store."""
    with request.param() as found:
        nodes = found[:2] if isinstance(found, list) else [found]
        scheme = "redis" if len(nodes) == 1 else "redis+cluster"
        url = f"{scheme}://{','.join(node.address for node in nodes)}"
        with stack(bundle(LOOPS), "--store", url, replicas=2) as made:
            yield made


@pytest.mark.parametrize("shape", deepen(["chat", "anthropic", "responses", "gemini"], "chat", "anthropic"))
@pytest.mark.parametrize("window", [0, 3])
def test_the_one_that_loops_is_stopped_whichever_replica_it_meets(stacked: Stack, shape: str, window: int) -> None:
    """Six conversations of one caller side by side; older results are cleared, or older messages left out."""
    random = Random(f"{shape}{window}")
    headers = {"x-user-id": f"{shape}-{window}"}
    statuses: list[list[int]] = [[] for _ in range(6)]
    begun = [Did((("look", {"at": random.randrange(10**6)}),), (str(random.randrange(10**6)),)) for _ in range(6)]
    before = [replica.metric("requests_total") for replica in stacked.replicas]
    for count in range(7):
        for place in random.sample(range(6), 6):
            work = [STUCK] * 8 if place == 0 else [STUCK._replace(results=(f"{place} {turn}",)) for turn in range(8)]
            turns = [begun[place], *work][:count]
            turns = [turn._replace(thought=f"{place} thinks {at}", number=at + 1) for at, turn in enumerate(turns)]
            shown = turns[-window:] if window else [turn._replace(results=("[cleared]",)) for turn in turns[:-2]] + turns[-2:]
            statuses[place].append(stacked.post("/v1/x", SHAPES[shape](shown), headers).status)

    assert 429 not in statuses[0][:4]
    assert statuses[0][4:] == [429] * 3
    assert not any(429 in others for others in statuses[1:])
    assert all(replica.metric("requests_total") > was for replica, was in zip(stacked.replicas, before, strict=True))
