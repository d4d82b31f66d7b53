"""Which callers a policy acts on while `enforce_percent` is raised."""

from math import sqrt
from typing import Any

import pytest

from extproc.ext_proc.service import Service
from extproc.request.fingerprint import MAX_TARGET
from tests.support import ROOT
from tests.support.documents import policy
from tests.support.engine import ANY, make_engine
from tests.support.messages import body, headers
from tests.support.service import (
    RecordingStore,
    exchange,
    headers_of,
    make_service,
    metadata_of,
    repeat,
    sample,
)

USER = "header:x-user"
LOOP = (ROOT / "tests" / "support" / "bodies" / "responses_previous.json").read_bytes()


def ramped(
    percent: int,
    identity: str = "p",
    store: RecordingStore | None = None,
    **more: Any,  # noqa: ANN401  # keys of the policy
) -> Service:
    return make_service(
        policy(identity, ANY, enforce_percent=percent, **{"limit_keys": [USER], **more}),
        store=store,
    )


def count(service: Service, mode: str, policy: str = "p") -> float:
    return sample(service, "requests_total", policy=policy, mode=mode, action="allow")


def acts_on(
    service: Service, user: str = "", path: str = "/", policy: str = "p", **more: str
) -> bool:
    """Whether the policy acts on a request; otherwise it watches it."""
    before = count(service, "enforce", policy), count(service, "shadow", policy)
    given: dict[str, Any] = {"x_user": user, **more} if user else more
    exchange(service, headers(path, end=True, **given))
    acted, watched = (
        count(service, "enforce", policy) - before[0],
        count(service, "shadow", policy) - before[1],
    )
    assert acted + watched == 1
    return bool(acted)


@pytest.mark.slow
@pytest.mark.parametrize("percent", [5, 75])
def test_share_of_callers_is_as_configured(percent: int) -> None:
    callers, share = 1_000, percent / 100
    service = ramped(percent)

    for number in range(callers):
        exchange(service, headers(end=True, x_user=f"user-{number}"))

    assert abs(count(service, "enforce") - callers * share) <= 4 * sqrt(
        callers * share * (1 - share)
    )
    assert count(service, "enforce") + count(service, "shadow") == callers


@pytest.mark.parametrize(
    ("seed", "places"),
    [
        ("p", {"ann": 29, "bob": 50, "carl": 4, "dora": 73, "\u00e9": 68}),
        ("other", {"ann": 74, "bob": 15, "carl": 45, "dora": 79, "\u00e9": 21}),
    ],
)
def test_places_of_callers_never_change(seed: str, places: dict[str, int]) -> None:
    """Replicas of two versions agree about places: another hash would move every caller."""
    for user, place in places.items():
        assert not acts_on(ramped(place - 1, ramp_seed=seed), user)
        assert acts_on(ramped(place, ramp_seed=seed), user)


def test_policies_choose_other_callers_unless_seed_is_shared() -> None:
    users = [f"user-{number}" for number in range(100)]
    services = {
        "one": ramped(50, "one"),
        "other": ramped(50, "other"),
        "third": ramped(50, "third", ramp_seed="one"),
    }

    one, other, third = (
        {user for user in users if acts_on(made, user, policy=name)}
        for name, made in services.items()
    )

    assert third == one
    assert 10 < len(one & other) < 40


def test_order_of_keys_makes_no_difference() -> None:
    keys = [USER, "query:team"]

    services = ramped(50, limit_keys=keys), ramped(50, limit_keys=keys[::-1])
    there, back = (
        [acts_on(service, "ann", f"/?team={n}") for n in range(20)] for service in services
    )

    assert there == back
    assert set(there) == {True, False}


@pytest.mark.parametrize("user", ["ann", "carl"])
def test_callers_outside_the_share_are_watched(user: str) -> None:
    store = RecordingStore()

    answer = repeat(ramped(25, store=store), headers(end=True, x_user=user), times=3)

    acting = user == "carl"
    assert headers_of(answer).get("x-loopguard-policy") == ("p" if acting else None)
    assert metadata_of(answer)["action" if acting else "shadow_action"] == "reject"
    assert {key.partition("loop:p:")[0] for key in store.keys} == {"" if acting else "shadow:"}


def test_ramp_by_chooses_callers_by_other_keys() -> None:
    store = RecordingStore()
    service = ramped(50, store=store, ramp_by=["header:x-org"])

    acted = [
        {acts_on(service, user, f"/{org}", x_org=f"{org}") for user in ("ann", "bob")}
        for org in range(40)
    ]

    assert {len(found) for found in acted} == {1}
    assert set.union(*acted) == {True, False}
    assert len(set(store.keys)) == 80


def test_caller_without_keys_is_watched_below_100_percent() -> None:
    assert [acts_on(ramped(percent, ramp_by=["jwt:org"]), "ann") for percent in (1, 99, 100)] == [
        False,
        False,
        True,
    ]


def test_missing_keys_are_reported_once() -> None:
    service = ramped(99, ramp_by=["jwt:org", USER], missing_descriptor="share")

    exchange(service, headers(end=True))

    missing = [
        sample(service, "missing_descriptor_total", policy="p", key=key)
        for key in ("jwt:org", USER)
    ]
    assert missing == [1, 1]


def test_uncounted_query_chooses_no_caller() -> None:
    service = ramped(99, limit_keys=["query:user"])

    exchange(service, headers(f"/?user=ann&{'a' * MAX_TARGET}", end=True))

    assert sample(service, "uncounted_total", policy="p", reason="target_too_long") == 1
    assert count(service, "enforce") == count(service, "shadow") == 0


def test_failing_ramp_acts_on_no_caller() -> None:
    shares = policy("p", ANY, enforce_percent=99, limit_keys=[USER])
    service = make_service(shares, policy("q", ANY, limit_keys=[USER], action="warn"))
    broken: Any = service.engine.plans[0].ramp
    broken.descriptors = (None,)

    assert not acts_on(service, "carl")
    assert count(service, "enforce", "q") == 1
    assert sample(service, "fail_open_total", reason="internal_error") == 1


def test_global_shadow_overrides_the_share() -> None:
    service = make_service()
    item = policy("p", ANY, enforce_percent=99, limit_keys=[USER])

    for engine in (
        make_engine(item, shadow=True),
        make_engine(item, global_shadow={"enabled": True}),
    ):
        service.engine = engine
        assert not acts_on(service, "carl")


@pytest.mark.parametrize(
    ("keep", "namespaces"), [(False, ["shadow:", "shadow:", "", ""]), (True, ["shadow:"] * 4)]
)
def test_keep_counts_decides_what_entering_callers_bring(keep: bool, namespaces: list[str]) -> None:
    store = RecordingStore()
    session: dict[str, Any] = {"limit_keys": [USER], "session": {}, "similarity": "turns"}
    steps = [make_service(policy("p", ANY, mode="shadow", **session), store=store)]
    steps += [
        ramped(percent, store=store, keep_counts=keep, **session) for percent in (28, 29, 100)
    ]

    for service in steps:
        exchange(service, headers("/v1/responses", x_user="ann", x_session_id="s"), body(LOOP))

    assert [key.partition("ring:")[0] for key in store.keys if "ring:" in key] == namespaces
