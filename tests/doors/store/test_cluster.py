"""Sentinel and Cluster, on real servers: where keys are, shards that fail alone, and failover."""

import asyncio
import logging
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS, key_slot

from extproc.errors import PartlyAwayError, StoreError
from extproc.store.client import make_access
from extproc.store.link import ServerAddress
from extproc.store.redis import TAGS
from extproc.store.rules.documents import BOARDS, ORDERS
from extproc.store.topology import ClusterLayout, spread_tags
from tests.support.harness import eventually
from tests.support.ledger import NO_LIMITS, limit, make_step, settle_step
from tests.support.records import replace
from tests.support.servers import ACL, Driver, Server, cluster, sentinels
from tests.support.windows import WINDOW_TYPES, make_hit, make_push

SECRET = "hunter2"

AWAY_AFTER = 2
"""Seconds until a shard that hangs counts as away; others answer sooner on a busy machine, too."""


@pytest.fixture(scope="module")
def six() -> Iterator[list[Server]]:
    with cluster() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def three() -> Iterator[list[Server]]:
    """A cluster of three primaries that have no replicas; a test has to leave it well."""
    with cluster(replicas=False, full=False) as nodes:
        yield nodes


def find_slot(tag: str) -> int:
    return key_slot(tag.encode())


def name_keys(number: int, node: int) -> list[str]:
    """That many keys of a third of a cluster's slots."""
    tags = spread_tags(TAGS)
    mine = [
        f"{place:02x}" for place in range(256) if find_slot(tags[place % TAGS]) * 3 // SLOTS == node
    ]
    return [f"{turn}:{mine[turn % len(mine)]}" for turn in range(number)]


def ask(driver: Driver, asked: Sequence[Any]) -> Any:  # noqa: ANN401  # answers or the error
    try:
        return driver.settled(lambda store: store.hit(asked))
    except StoreError as error:
        return error


def count_each(driver: Driver, keys: list[str]) -> list[int | str]:
    found: list[int | str] = []
    for key in keys:
        answer = ask(driver, [make_hit(key=driver.name(key), window_ms=600_000, threshold=100)])
        found.append(answer.kind if isinstance(answer, StoreError) else answer[0].count)
    return found


def test_tags_spread_evenly() -> None:
    assert sorted(find_slot(tag) * TAGS // SLOTS for tag in spread_tags(TAGS)) == list(range(TAGS))


def test_cluster_keys_use_few_slots_on_every_primary(six: list[Server]) -> None:
    """Keys use at most 16 slots; each primary has its share, and gets a batch of its own."""
    with Driver("redis+cluster://" + six[1].address) as driver:
        hits = [make_hit(key=str(number), window_ms=3_600_000) for number in range(300)]
        for start in range(0, 300, 100):
            driver.count(hits[start : start + 100])

        slots = {
            six[0].client().cluster("keyslot", key)
            for node in six[:3]
            for key in node.client().keys("loopguard:*")
        }
        sizes = [node.client().dbsize() for node in six[:3]]
        assert len(slots) <= TAGS
        assert min(sizes) > 300 / 3 / 2
        assert driver.metric("store_batch_size_count") == 3 * 3
        before = sum(node.commands()["evalsha"] for node in six[:3])
        driver.count(hits[:200])
        assert sum(node.commands()["evalsha"] for node in six[:3]) - before <= TAGS


def test_cluster_user_needs_only_documented_rights(six: list[Server]) -> None:
    """A cluster asks for one more right than a single server does: to ask who has which slots."""
    for node in six:
        node.client().execute_command(
            "ACL", "SETUSER", "counter", "on", f">{SECRET}", *ACL.split(), "+cluster|slots"
        )

    with Driver(f"redis+cluster://counter:{SECRET}@{six[0].address}") as driver:
        driver.count(
            [
                make_hit(kind, key=f"{kind}-{number}")
                for kind in WINDOW_TYPES
                for number in range(50)
            ]
        )

        assert driver.store.health() == "ok"


def test_each_node_is_asked_for_the_slots(six: list[Server]) -> None:
    """A node that was cut off and believes in owners of old is not the only one that is asked."""
    slots = ClusterLayout([ServerAddress("127.0.0.1", six[0].port)], make_access("redis", {}), TAGS)

    def count_questions() -> list[int]:
        counted = [node.commands() for node in six]
        # Redis 6.2 counts all of `cluster`.
        return [each.get("cluster|slots", each.get("cluster", 0)) for each in counted]

    before = count_questions()

    def all_asked() -> bool:
        asyncio.run(slots.learn())
        return all(now > then for now, then in zip(count_questions(), before, strict=True))

    eventually(all_asked, "a question to each node")


@pytest.mark.parametrize("client", ["", "?client=redis-py"])
def test_moving_slots_are_followed(six: list[Server], client: str) -> None:
    """While a slot's keys move to another primary, and after, each key is found."""
    source, target = six[0], six[1]
    tags = spread_tags(TAGS)
    tag = [tag for tag in tags if find_slot(tag) < SLOTS // 3][client != ""]
    slot, numbers = find_slot(tag), [number for number in range(256) if tags[number % TAGS] == tag]
    board = next(
        name for name in map(str, range(256)) if tags[zlib.crc32(name.encode()) % TAGS] == tag
    )
    with Driver(f"redis+cluster://{six[2].address}{client}") as driver:
        hits = [
            make_hit(window_ms=600_000, threshold=100, key=f"{driver.name('moving')}:{number:02x}")
            for number in numbers
        ]

        def request(number: int, sessions: int) -> tuple[list[int], list[int]]:
            caller, limits = f"sessions:{numbers[0]:02x}", limit(idle_ms=600_000)
            keys = [f"moving:{name}:{numbers[0]:02x}" for name in range(sessions)]
            standings = driver.account(
                [make_step(number, limits, key=key, caller=caller) for key in keys]
            )
            return [answer.count for answer in ask(driver, hits)], [
                standing.steps for standing in standings
            ]

        def move(keys: list[bytes]) -> None:
            for key in keys:
                source.client().migrate("127.0.0.1", target.port, key, 0, 1_000)

        driver.put(BOARDS, board, "a", b"x", 60)
        assert request(1, 20) == ([1] * len(hits), [1] * 20)
        ids = [
            node.client().execute_command("CLUSTER", "MYID").decode() for node in (source, target)
        ]
        target.client().execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        source.client().execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
        move(source.client().keys("loopguard:*moving*")[::2])

        assert request(2, 25) == ([2] * len(hits), [2] * 20 + [1] * 5)
        move(source.client().execute_command("CLUSTER", "GETKEYSINSLOT", slot, 10_000))
        for node in (target, source, six[2]):
            node.client().execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])

        assert request(3, 25) == ([3] * len(hits), [3] * 20 + [2] * 5)
        assert (driver.store.health(), driver.read(BOARDS, board)) == ("ok", {"a": b"x"})


# --- shards that are away

SHARD_TROUBLES = {"down": (Server.kill, Server.start), "hung": (Server.hang, Server.resume)}


@contextmanager
def trouble(
    driver: Driver, broken: Server, kind: str = "hung", lost: Sequence[str] = ()
) -> Iterator[None]:
    """A primary is in trouble, which is known if there are lost keys; and well again in the end."""
    harm, cure = SHARD_TROUBLES[kind]
    harm(broken)
    try:
        if lost:
            eventually(lambda: count_each(driver, [*lost]) == ["unavailable"], "the outage")
        yield
    finally:
        cure(broken)
    eventually(driver.well, "the recovery")


@pytest.mark.parametrize("kind", SHARD_TROUBLES)
def test_unavailable_shard_loses_only_its_keys(
    three: list[Server], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "loopguard")
    lost, *others = [name_keys(20, node) for node in (1, 0, 2)]
    kept = [key for keys in others for key in keys]
    with Driver(f"redis+cluster://{three[0].address}", store_timeout=AWAY_AFTER) as driver:
        assert set(count_each(driver, [*lost, *kept])) == {1}
        with trouble(driver, three[1], kind, lost[:1]):
            refused, counted = count_each(driver, lost), count_each(driver, kept)
            up = [driver.metric("store_up", shard=node.address) for node in three]
            health = driver.store.health()

        assert (set(refused), set(counted), up) == ({"unavailable"}, {2}, [1, 0, 1])
        assert health.startswith(f"1 of 3 shards unavailable: {three[1].address}: ")
        assert set(count_each(driver, lost)) <= {1, 2, 3}
        assert driver.metric("store_up", shard=three[1].address) == 1
    told = [
        (record.message, vars(record)["fields"]["shard"])
        for record in caplog.records
        if record.name == "loopguard"
    ]
    assert told == [
        ("shard of the store unavailable, each replica counts separately", three[1].address),
        ("shard of the store available again", three[1].address),
    ]


def test_request_gets_the_counts_of_healthy_shards(three: list[Server]) -> None:
    hits = [
        make_hit(key=f"several:{name_keys(1, node)[0]}", window_ms=600_000, threshold=100)
        for node in range(3)
    ]
    with Driver(f"redis+cluster://{three[0].address}", store_timeout=AWAY_AFTER) as driver:
        ask(driver, hits)
        with trouble(driver, three[1]):
            partly = [ask(driver, hits) for _ in range(2)]
            alone = ask(driver, [hits[1], replace(hits[1], key=f"x{hits[1].key}")])

    for error, count in zip(partly, (2, 3), strict=True):
        assert isinstance(error, PartlyAwayError)
        assert [answer and answer.count for answer in error.answers] == [count, None, count]
    assert type(alone) is StoreError


def test_reject_counts_nothing_of_a_refused_request(three: list[Server]) -> None:
    """With `reject`, a request that one shard will refuse is not counted on another."""
    keys = [name_keys(1, node)[0] for node in range(2)]
    hits = [make_hit(key=f"whole:{key}", window_ms=600_000, threshold=100) for key in keys]
    step, gone = (
        make_step(1, NO_LIMITS, key=f"open:{key}", caller=f"caller:{key}") for key in keys
    )
    with Driver(
        f"redis+cluster://{three[0].address}", on_store_error="reject", store_timeout=AWAY_AFTER
    ) as driver:
        ask(driver, [step])
        with trouble(driver, three[1], lost=name_keys(1, 1)):
            refused = ask(driver, hits)
            settled = ask(driver, [settle_step(step), settle_step(gone)])
            counted = ask(driver, hits[:1])

    assert (type(refused), refused.kind, counted[0].count) == (StoreError, "unavailable", 1)
    assert isinstance(settled, PartlyAwayError)
    assert [answer and (answer.steps, answer.retry) for answer in settled.answers] == [
        (1, False),
        None,
    ]


def test_documents_of_other_shards_stay_available(three: list[Server]) -> None:
    tags = spread_tags(TAGS)
    names = {
        find_slot(tags[zlib.crc32(name.encode()) % TAGS]) * 3 // SLOTS: name
        for name in map(str, range(100))
    }
    with Driver(f"redis+cluster://{three[0].address}", store_timeout=AWAY_AFTER) as driver:
        for name in names.values():
            driver.put(ORDERS, name, "a", b"x", 60)
        with trouble(driver, three[1], lost=name_keys(1, 1)):
            with pytest.raises(StoreError) as error:
                driver.put(BOARDS, names[1], "a", b"x", 60)
            for node in (0, 2):
                driver.put(BOARDS, names[node], "a", b"x", 60)
                assert (
                    driver.read(ORDERS, names[node])
                    == driver.read(BOARDS, names[node])
                    == {"a": b"x"}
                )

        assert (error.value.kind, driver.read(ORDERS, names[1])) == ("unavailable", {"a": b"x"})


def test_cluster_node_as_a_single_server_is_explained(six: list[Server]) -> None:
    with Driver(f"redis://{six[0].address}") as driver:
        healths = []
        for number in range(TAGS):  # a probe of the node itself succeeds soon after
            count_each(driver, [f"{number}:{number:02x}"])
            healths.append(driver.store.health())

        assert any("use redis+cluster://" in health for health in healths)


# --- who takes over


def test_replica_continues_counting_after_a_failover() -> None:
    """Keys of a dead primary are found on its replica, which has the counts but not the scripts."""
    lost, kept = name_keys(10, 1), name_keys(10, 0)
    with (
        cluster(full=False) as nodes,
        Driver(f"redis+cluster://{nodes[0].address}", store_timeout=AWAY_AFTER) as driver,
    ):
        assert set(count_each(driver, [*lost, *kept])) == {1}
        driver.push([make_push("a")])
        eventually(lambda: all(node.client().dbsize() for node in nodes[3:]), "replication")
        nodes[1].hang()
        eventually(lambda: count_each(driver, lost[:1]) == ["unavailable"], "the outage")
        assert set(count_each(driver, kept)) == {2}

        eventually(
            lambda: driver.well() and count_each(driver, lost[:1]) != ["unavailable"],
            "the failover",
        )

        assert set(count_each(driver, lost[1:])) == {2}
        assert driver.metric("store_up", shard=nodes[4].address) == 1
        assert (
            driver.metrics.registry.get_sample_value(
                "loopguard_store_up", {"shard": nodes[1].address}
            )
            is None
        )
        nodes[1].resume()
        assert (set(count_each(driver, kept)), driver.store.health()) == ({3}, "ok")


def test_sentinels_name_the_primary_and_its_successor() -> None:
    with sentinels() as (watchers, primary, replica):
        watchers[0].kill()
        hosts = ",".join(watcher.address for watcher in watchers)
        with Driver(f"redis+sentinel://{hosts}/counts", store_timeout=1) as driver:
            assert count_each(driver, ["a:00"]) == [1]
            eventually(lambda: replica.client().dbsize() >= 1, "replication")
            primary.kill()

            eventually(
                lambda: driver.well() and count_each(driver, ["b:00"]) != ["unavailable"],
                "the failover",
            )

            assert (count_each(driver, ["a:00"]), replica.client().role()[0]) == ([2], b"master")
        with Driver(f"redis+sentinel://{hosts}/other") as driver:
            assert "does not watch other" in driver.store.health()
        replica.client().config_set("requirepass", SECRET)
        for watcher in watchers[1:]:
            watcher.client().execute_command("ACL", "SETUSER", "default", "resetpass", f">{SECRET}")
        with Driver(f"redis+sentinel://:{SECRET}@{hosts}/counts/1") as driver:
            assert (driver.store.health(), driver.count([make_hit()])[0].count) == ("ok", 1)
            assert replica.client(password=SECRET, db=1).exists(
                f"loopguard:{driver.key(make_hit())}"
            )
