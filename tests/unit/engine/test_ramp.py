"""Which callers a policy acts on while it is ramped up, without clock, store or socket."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.decision import Action
from extproc.engine.engine import Engine
from extproc.engine.ramp import Ramp
from extproc.metrics import Metrics
from extproc.request.fingerprint import MAX_TARGET, NO_BODY
from extproc.request.http import HttpRequest, StatedFacts, compile_descriptors
from extproc.store.memory import MemoryStore
from extproc.store.rules.windows import Hit
from tests.support import ROOT
from tests.support.documents import policy
from tests.support.engine import ANY, LOOP, get, make_engine

USER = "header:x-user"
BODIES = ROOT / "tests" / "support" / "bodies"


def ramped(percent: int, identity: str = "p", **more: Any) -> Engine:  # noqa: ANN401  # keys of the policy
    """An engine of one policy that acts on this share of its callers."""
    return make_engine(policy(identity, ANY, enforce_percent=percent, **{"limit_keys": [USER], **more}))


def place(user: str, seed: str = "p", key: str = USER) -> int:
    """A caller's place among those of a seed."""
    return Ramp(1, compile_descriptors([key]), seed).find_place(get(x_user=user))


def acts_on(engine: Engine, request: HttpRequest) -> bool:
    """Whether the policy acts on a request; else it watches it."""
    evaluation = engine.prepare(request)
    assert evaluation is not None
    assert bool(evaluation.enforcing.candidates) != bool(evaluation.shadow.candidates)
    return bool(evaluation.enforcing.candidates)


def hit(engine: Engine, request: HttpRequest) -> Hit:
    """What a request is counted by."""
    evaluation = engine.prepare(request)
    assert evaluation is not None
    evaluation.read_body(NO_BODY)
    (candidate,) = [*evaluation.enforcing.candidates, *evaluation.shadow.candidates]
    assert isinstance(candidate.hit, Hit)
    return candidate.hit


@given(user=st.text(min_size=1), smaller=st.integers(1, 100), larger=st.integers(1, 100), seed=st.from_regex(r"\A[a-z]{1,9}\Z"))
def test_a_larger_share_holds_every_smaller_one(user: str, smaller: int, larger: int, seed: str) -> None:
    """A caller that is acted on at one percentage is acted on at every higher one, whatever the policy."""
    smaller, larger = sorted((smaller, larger))
    request = HttpRequest("GET", "/", "host", {"x-user": user.encode("utf-8", "surrogatepass")})

    if acts_on(ramped(smaller, ramp_seed=seed), request):
        assert acts_on(ramped(larger, ramp_seed=seed), request)


@pytest.mark.slow
@pytest.mark.parametrize("percent", [1, 5, 25, 50, 75, 99])
def test_the_share_is_what_was_asked_for(percent: int) -> None:
    """Of 20,000 callers as many are acted on as chance would choose, within four standard deviations."""
    callers, share = 20_000, percent / 100
    engine = ramped(percent)

    acted_on = sum(acts_on(engine, get(x_user=f"user-{number}")) for number in range(callers))

    assert abs(acted_on - callers * share) <= 4 * sqrt(callers * share * (1 - share))


def test_a_place_is_the_same_everywhere_and_for_good() -> None:
    """Places are part of what replicas of two versions agree about: another hash would move every caller."""
    assert [place(user) for user in ("ann", "bob", "carl", "dora", "\u00e9")] == [29, 50, 4, 73, 68]
    assert [place(user, "other") for user in ("ann", "bob", "carl", "dora", "\u00e9")] == [74, 15, 45, 79, 21]


def test_policies_choose_for_themselves_unless_they_share_a_seed() -> None:
    """The first steps of different policies reach different callers, unless a policy under a new name keeps the old seed."""
    users = [f"user-{number}" for number in range(400)]

    one, other, same = (
        {user for user in users if acts_on(engine, get(x_user=user))}
        for engine in (ramped(50, "one"), ramped(50, "other"), ramped(50, "third", ramp_seed="one"))
    )

    assert same == one
    assert 60 < len(one & other) < 140


def test_the_order_of_the_keys_makes_no_difference() -> None:
    """A caller is what its values are, in whatever order a policy names them."""
    keys = [USER, "query:team"]
    there, back = (Ramp(50, compile_descriptors(order), "p") for order in (keys, keys[::-1]))

    places = [(ramp.find_place(get(f"/?team={n}", x_user="ann"))) for ramp in (there, back) for n in range(9)]

    assert places[:9] == places[9:]
    assert len(set(places)) > 1


def test_those_who_are_out_are_watched() -> None:
    """They count and are reported as in shadow, under shadow's keys, and nothing is done about their loops."""
    engine = ramped(25)

    for user, acting in (("carl", True), ("ann", False)):
        evaluation = engine.prepare(get(x_user=user))
        assert evaluation is not None
        evaluation.read_body(NO_BODY)
        decision = evaluation.decide(*(([LOOP], ()) if acting else ((), [LOOP])))

        (outcome,) = decision.trace
        assert (outcome.mode, outcome.action) == ("enforce" if acting else "shadow", Action.REJECT)
        assert decision.action is (Action.REJECT if acting else Action.ALLOW)
        assert hit(engine, get(x_user=user)).key.startswith("loop:p:" if acting else "shadow:loop:p:")


def test_callers_are_chosen_by_other_keys_than_they_are_counted_by() -> None:
    """All users of an organisation are in or out together, and each of them is counted for itself."""
    engine = ramped(50, ramp_by=["jwt:org"])

    orgs = {}
    for org in map(str, range(40)):
        requests = [
            HttpRequest("GET", "/", "host", {"x-user": user}, StatedFacts(claims={"org": org})) for user in (b"ann", b"bob")
        ]
        (orgs[org],) = {acts_on(engine, request) for request in requests}
    hits = [
        hit(engine, HttpRequest("GET", "/", "host", {"x-user": user}, StatedFacts(claims={"org": "1"})))
        for user in (b"ann", b"bob")
    ]

    assert set(orgs.values()) == {True, False}
    assert hits[0].key != hits[1].key


def test_a_caller_without_keys_is_watched_until_all_callers_are_acted_on() -> None:
    """Callers without keys would all be in or all be out; at 100 percent all callers are in."""
    for percent in (1, 99):
        assert not acts_on(ramped(percent, ramp_by=["jwt:org"]), get(x_user="ann"))
    assert acts_on(ramped(100, ramp_by=["jwt:org"]), get(x_user="ann"))
    assert ramped(100).plans[0].ramp is None


def test_keys_that_a_caller_lacks_are_reported_once() -> None:
    """A key that alone chooses callers is missing like a limit key; one that is both is told where it is counted by."""
    evaluation = ramped(99, ramp_by=["jwt:org", USER], missing_descriptor="share").prepare(get())
    assert evaluation is not None

    assert [(group.shadow, group.missing) for group in evaluation.groups] == [
        (False, [("p", "jwt:org")]),
        (True, [("p", USER)]),
    ]


def test_a_query_that_is_not_counted_chooses_no_caller() -> None:
    """What takes too long to read is not read to choose by it, either."""
    request = get(f"/?user=ann&{'a' * MAX_TARGET}")
    evaluation = ramped(99, limit_keys=["query:user"]).prepare(request)
    assert evaluation is not None

    assert evaluation.list_uncounted() == [("p", "target_too_long")]
    assert request._pairs is None


def test_a_ramp_that_fails_acts_on_no_caller() -> None:
    """The error is reported, the caller is watched, and another policy acts on as it did."""
    engine = make_engine(
        policy("p", ANY, enforce_percent=99, limit_keys=[USER]), policy("q", ANY, limit_keys=[USER], action="warn")
    )
    broken: Any = engine.plans[0].ramp
    broken.descriptors = (None,)

    evaluation = engine.prepare(get(x_user="carl"))
    assert evaluation is not None

    assert [name for name, _ in evaluation.enforcing.failures] == ["p"]
    assert [candidate.plan.id for candidate in evaluation.enforcing.candidates] == ["q"]
    assert [candidate.plan.id for candidate in evaluation.shadow.candidates] == ["p"]


def test_shadow_mode_of_everything_knows_no_share() -> None:
    """Where the whole server or bundle is in shadow, no caller is acted on."""
    item = policy("p", ANY, enforce_percent=99, limit_keys=[USER])

    for engine in (make_engine(item, shadow=True), make_engine(item, global_shadow={"enabled": True})):
        assert engine.plans[0].ramp is None
        assert not acts_on(engine, get(x_user="carl"))


@pytest.mark.parametrize(("keep", "counts"), [(False, [1, 2, 1, 2]), (True, [1, 2, 3, 4])])
def test_who_enters_starts_at_zero_or_brings_the_counts_along(keep: bool, counts: list[int]) -> None:
    """From shadow, over a share without the caller to one with it, and then to all callers."""
    store, request = MemoryStore(Metrics(), 100), get(x_user="ann")
    shadow = policy("p", ANY, mode="shadow", limit_keys=[USER])
    steps = [make_engine(shadow), *(ramped(percent, keep_counts=keep) for percent in (28, 29, 100))]

    found = [store.hit([hit(engine, request)], 0)[0].count for engine in steps]

    assert found == counts


def test_sessions_are_kept_along_with_the_counts() -> None:
    """What a session has shown is forgotten or remembered as the counts are."""
    data = (BODIES / "responses_previous.json").read_bytes()
    rings = []
    for keep in (False, True):
        engine = ramped(25, keep_counts=keep, session={}, similarity="turns")
        request = HttpRequest("POST", "/v1/responses", "host", {"x-user": b"carl", "x-session-id": b"s"})
        evaluation = engine.prepare(request)
        assert evaluation is not None
        evaluation.read_body(NO_BODY.plus(data), "", data)
        rings += [push.key.partition("ring:")[0] for push in evaluation.enforcing.list_pushes()]

    assert rings == ["", "shadow:"]
