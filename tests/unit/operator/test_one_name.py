"""A caller has one name under every policy, which orders, pages and commands use."""

from __future__ import annotations

import time
from typing import Any

import pytest

from extproc.engine.orders import hash_descriptor
from extproc.ext_proc.service import Service
from extproc.operator.admin.budget_report import report_budgets
from extproc.operator.admin.loop_report import describe_loops
from extproc.operator.admin.reports import Selection, matches
from extproc.operator.admin.session_report import report_sessions
from extproc.operator.board import View
from extproc.operator.budget_rows import BudgetDocument
from extproc.operator.loop_rows import LoopDocument
from extproc.operator.overrides import Seen, describe_override
from extproc.operator.session_rows import SessionDocument
from extproc.request.hash_key import PROCESS_KEY
from extproc.server import _find_seen
from extproc.sessions.prices import Prices
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.orders import Replicas
from tests.support.service import decoded, exchange
from tests.support.session_limits import limited

KEY = "sk-secret"
HIDDEN = PROCESS_KEY.hide(KEY)
ALTERNATIVES = {"first_of": ["jwt:sub", "credential", "header:x-user-id"], "name": "caller"}
OWN_KEYS: list[list[Any]] = [["credential"], ["header:authorization"], [ALTERNATIVES], [ALTERNATIVES, "credential"]]


def budget(name: str, limit_keys: list[Any], by: str = "header:x-user-id") -> dict[str, Any]:
    """A policy with a budget of two requests, whose rule tells callers apart by other keys than the policy."""
    algorithm = {"algorithm": "token_bucket", "algorithm_config": {"tokens_per_second": 0.001, "burst": 2}}
    made = policy(name, ANY, limit_keys=[by])
    del made["spec"]["loop_detection"]
    made["spec"]["rules"] = [{"name": "few", "limit_keys": limit_keys, **algorithm}]
    return made


def send(service: Service, times: int = 1, **given: str) -> list[int]:
    """What becomes of equal requests with these headers: the status of each refusal, or 200."""
    named: dict[str, Any] = given or {"authorization": f"Bearer {KEY}"}
    answers = [decoded(exchange(service, headers("/v1/chat/completions", **named), body(b"{}"))[-1]) for _ in range(times)]
    return [answer.immediate_response.status.code or 200 for answer in answers]


def look(service: Service) -> tuple[View[LoopDocument], View[SessionDocument], View[BudgetDocument]]:
    """What is published."""
    reporter, now = service.reporter, time.time()
    loops = LoopDocument.merge([reporter.loops.make_document(shows_callers=False)], now)
    sessions = SessionDocument.merge([reporter.sessions.make_document(shows_callers=False)], now)
    budgets = BudgetDocument.merge([reporter.budgets.make_document(shows_callers=False)], now)
    return View(loops, "r", ["r"], ""), View(sessions, "r", ["r"], ""), View(budgets, "r", ["r"], "")


def list_rows(service: Service) -> list[dict[str, Any]]:
    """The rows of all pages, as a stranger sees them."""
    loops, sessions, budgets = look(service)
    now = time.time()
    return [
        *describe_loops(loops.document, Prices(None), [], shows_callers=False, now=now),
        *report_sessions(sessions, Selection(), shows_callers=False, now=now)["sessions"],
        *report_budgets(budgets, Selection(), shows_callers=False, now=now)["budgets"],
    ]


def give(one: Replicas, **fields: Any) -> tuple[dict[str, Any], list[str]]:  # noqa: ANN401  # as JSON
    """Give an order; returns the answer and its notes."""
    seen: Seen = _find_seen(*look(one.services[0]))
    one.givers[0].list_seen = lambda: seen
    given, notes = one.give(**fields)
    return describe_override(given), notes


@pytest.mark.parametrize("keys", OWN_KEYS)
def test_a_key_has_one_name_everywhere(keys: list[Any]) -> None:
    """Whichever limit key finds it, in loops, sessions and budgets, as the hash of the key itself."""
    session = limited(max_steps=9, session={"keys": ["header:x-session-id"]})
    session["spec"] |= {"limit_keys": keys}
    one = Replicas(1, policy("loops", ANY, limit_keys=keys), session, budget("money", keys, by=keys[-1]))
    send(one.services[0], 3, authorization=f"Bearer {KEY}", x_session_id="s")

    rows = list_rows(one.services[0])
    assert len({row["policy"] for row in rows}) == 3
    assert {row["caller"] for row in rows} == {HIDDEN}


def test_alternatives_name_a_header_as_its_own_key_does() -> None:
    """A value of `first_of` is no other caller than the same value alone, unless it comes from elsewhere."""
    plain = "header:x-user-id"
    one = Replicas(
        1,
        *[
            policy(name, ANY, limit_keys=keys)
            for name, keys in zip("abc", ([ALTERNATIVES], [plain], [ALTERNATIVES, plain]), strict=True)
        ],
    )
    send(one.services[0], 3, x_user_id="ann")

    assert {row["caller"] for row in list_rows(one.services[0])} == {hash_descriptor("x-user-id", "ann")}


def test_equal_values_of_two_sources_are_two_callers() -> None:
    """A client that writes another's claim into a header does not get the other's name."""
    keys = [{"first_of": ["query:team", "header:team"], "name": "caller"}]
    one = Replicas(1, policy("a", ANY, limit_keys=keys, threshold_identical_requests=2))
    send(one.services[0], 2, team="red")
    for _ in range(2):
        exchange(one.services[0], headers("/v1/x?team=red"), body(b"{}"))

    assert len({row["caller"] for row in list_rows(one.services[0])}) == 2


@pytest.mark.parametrize("shown", ["loops", "money"])
def test_an_order_about_one_row_frees_every_policy(shown: str) -> None:
    """The hash of any row is the caller's, and the answer names the policies that it meets."""
    live = [policy("loops", ANY, limit_keys=[ALTERNATIVES]), budget("money", ["credential"])]
    one = Replicas(1, *live, policy("other", ANY, limit_keys=["header:x-team"], mode="shadow"))
    assert send(one.services[0], 3)[-1] == 429
    row = next(row for row in list_rows(one.services[0]) if row["policy"] == shown)

    given, notes = give(one, kind="allow", caller=row["caller"])

    assert given["meets"] == ("loops", "money")
    assert [note.startswith("this meets loops, money, and not other, which") for note in notes] == [True]
    assert send(one.services[0], 3) == [200] * 3


@pytest.mark.parametrize("kind", ["block", "allow", "release"])
def test_an_order_names_the_caller_of_a_rule(kind: str) -> None:
    """A row of /budgets has a hash that orders understand, also where the policy tells callers apart by another key."""
    one = Replicas(1, budget("money", ["header:x-team"]), budget("more", ["credential"], by="credential"))
    named = {"x_user_id": "ann", "x_team": "red"}
    assert send(one.services[0], 3, **named) == [200, 200, 429]
    row = next(row for row in list_rows(one.services[0]) if row["policy"] == "money")

    given, notes = give(one, kind=kind, caller=row["caller"])

    assert given["meets"] == ("money",)
    assert [note.startswith("this meets money, and not more") for note in notes] == [True]
    assert send(one.services[0], 1, **named) == [400 if kind == "block" else 200]
    assert send(one.services[0], 1, x_user_id="ann", x_team="blue") == [200]


def test_a_release_of_one_rule_leaves_the_budgets_of_others() -> None:
    """What another caller's rule has counted for the same request stays."""
    made = budget("money", ["header:x-team"])
    made["spec"]["rules"].append({**made["spec"]["rules"][0], "name": "each", "limit_keys": ["header:x-user-id"]})
    one = Replicas(1, made)
    send(one.services[0], 3, x_user_id="ann", x_team="red")
    team = hash_descriptor("x-team", "red")
    give(one, kind="release", caller=team)

    assert send(one.services[0], 1, x_user_id="ann", x_team="red") == [429]
    assert send(one.services[0], 3, x_user_id="bob", x_team="red") == [200, 200, 429]


def test_values_of_several_descriptors_are_names_as_well() -> None:
    """Two users of one key are two callers, which an order about the key meets together."""
    keys = ["credential", "header:x-user-id"]
    one = Replicas(1, policy("loops", ANY, limit_keys=keys), policy("all", {"pathExact": "/o"}, limit_keys=["credential"]))
    for user in ("ann", "bob"):
        send(one.services[0], 3, authorization=f"Bearer {KEY}", x_user_id=user)
    rows = list_rows(one.services[0])
    assert len({row["caller"] for row in rows}) == 2
    assert all(matches(row, Selection(caller=HIDDEN)) for row in rows)

    given, notes = give(one, kind="allow", caller=HIDDEN)

    assert given["meets"] == ("loops",)
    assert notes[0] == f"this applies to 2 callers, which share {HIDDEN}"
    assert send(one.services[0], authorization=f"Bearer {KEY}", x_user_id="bob") == [200]


@pytest.mark.parametrize(
    "caller",
    [{"authorization": f"Bearer {KEY}"}, {"credential": KEY}, {"header:authorization": KEY}, {"credential": HIDDEN}],
    ids=["header", "credential", "limit key", "hash"],
)
@pytest.mark.parametrize("keys", OWN_KEYS)
def test_a_secret_is_ordered_about_by_any_of_its_keys(keys: list[Any], caller: dict[str, str]) -> None:
    """A policy that reads it from elsewhere is met, too."""
    one = Replicas(1, policy("loops", ANY, limit_keys=keys))

    assert give(one, kind="block", caller=caller)[0]["caller"] == HIDDEN
    assert send(one.services[0]) == [429]
    assert send(one.services[0], authorization="Bearer other") == [200]


@pytest.mark.parametrize("secret", [KEY, HIDDEN], ids=["clear", "hash"])
def test_a_secret_of_alternatives_is_ordered_about_as_explain_prints_it(secret: str) -> None:
    """Only its keyed hash is kept, also of a secret in clear."""
    one = Replicas(1, policy("loops", ANY, limit_keys=[ALTERNATIVES]))

    assert give(one, kind="block", caller={"caller": f"credential:{secret}"})[0]["caller"] == HIDDEN
    assert send(one.services[0]) == [429]


@pytest.mark.parametrize(
    "caller",
    [{"x-user-id": "ann"}, {"header:x-user-id": "ann"}, {"caller": "header:x-user-id:ann"}],
    ids=["name", "key", "both"],
)
def test_a_value_of_alternatives_is_ordered_about_by_its_key(caller: dict[str, str]) -> None:
    """As explain prints the key; the prefix of `first_of` need not be written."""
    one = Replicas(1, policy("loops", ANY, limit_keys=[ALTERNATIVES]))

    given, notes = give(one, kind="block", caller=caller)

    assert (given["meets"], notes) == (("loops",), [])
    assert send(one.services[0], x_user_id="ann") == [429]
    assert send(one.services[0], x_user_id="bob") == [200]


def test_an_order_says_which_policies_it_does_not_meet() -> None:
    """Those that tell callers apart by other keys, or have no limits of sessions."""
    one = Replicas(1, policy("team", ANY, limit_keys=["header:x-team"]), policy("key", ANY, limit_keys=["credential"]))

    assert give(one, kind="block", caller={"x-team": "red"})[0]["meets"] == ("team",)
    assert give(one, kind="block", tool="deploy")[0].get("meets") is None
