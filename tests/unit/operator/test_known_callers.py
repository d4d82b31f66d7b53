"""What stands beside a caller's hash for people, and how operators name callers whose descriptors are hashes of secrets."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from extproc.cli.commands import write_caller
from extproc.engine.orders import BLOCK, Target, hash_descriptor
from extproc.errors import BadOrderError
from extproc.ext_proc.service import Service
from extproc.operator.admin.conversation_report import GROUP_SORTS
from extproc.operator.admin.loop_report import describe_loops
from extproc.operator.admin.reports import Selection, matches, read_selection
from extproc.operator.admin.session_report import report_sessions
from extproc.operator.board import View
from extproc.operator.budget_rows import BudgetDocument
from extproc.operator.events import LoopEvents, SessionEvents
from extproc.operator.loop_rows import LoopDocument
from extproc.operator.overrides import Seen, write_override
from extproc.operator.session_rows import SessionDocument
from extproc.request.hash_key import PROCESS_KEY
from extproc.server import _find_seen
from extproc.sessions.prices import Prices
from extproc.store.rules.documents import ORDERS
from tests.support.bundles import plain, refused, spec
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.orders import Replicas, order
from tests.support.service import decoded, exchange, make_service
from tests.support.session_limits import limited

SECRET = "sk-secret"
HIDDEN = PROCESS_KEY.hide(SECRET)
CALLER = {"first_of": ["credential", "header:x-user-id"], "name": "caller"}
LABELS: dict[str, Any] = {"labels": ["header:x-team", "header:authorization"]}


def send(service: Service, times: int = 1, content: bytes = b"{}", **given: str) -> list[int]:
    """What becomes of equal requests of this caller: the status of each refusal, or 200."""
    named: dict[str, Any] = given or {"authorization": f"Bearer {SECRET}", "x_team": "blue"}
    answers = [decoded(exchange(service, headers("/v1/chat/completions", **named), body(content))[-1]) for _ in range(times)]
    return [answer.immediate_response.status.code or 200 for answer in answers]


def report(service: Service, **selected: str) -> list[dict[str, Any]]:
    """The loops behind the rows of `/loops`, as a stranger sees them."""
    document, selection = service.reporter.loops.make_document(shows_callers=False), read_selection(selected, GROUP_SORTS)
    loops = describe_loops(document, Prices(None), [], shows_callers=False, now=time.time())
    return [loop for loop in loops if matches(loop, selection)]


def test_alias_and_labels_stand_beside_the_hash(caplog: pytest.LogCaptureFixture) -> None:
    """In rows, logs, events and commands; callers are chosen by them; the secret is in none, as a label neither."""
    caplog.set_level(logging.WARNING)
    service = make_service(
        policy("p", ANY, limit_keys=["credential"], **LABELS), policy("other", {"pathExact": "/o"}, aliases={HIDDEN: "team-a"})
    )
    send(service, 3)
    events: list[Any] = []
    LoopEvents(lambda *event: events.append(event[2]), lambda: False).look(service.reporter.loops.copy(), time.time())
    (row,), (line,), (event,) = report(service), [vars(record)["fields"] for record in caplog.records], events
    labels = {"x-team": "blue", "authorization": HIDDEN}

    assert [(shown["alias"], shown["labels"]) for shown in (row, line, event)] == [("team-a", labels)] * 3
    assert (row["caller"], row["credentials"], row["descriptors"]) == (HIDDEN, [HIDDEN], None)
    assert write_caller(row) == f"team-a (x-team: blue, authorization: {HIDDEN})"
    chosen = ("team-a", "blue", HIDDEN, HIDDEN[:5], "team-b")
    assert [len(report(service, caller=name)) for name in chosen] == [1, 1, 1, 1, 0]
    assert SECRET not in f"{row}{line}{event}"


def test_labels_count_for_nothing() -> None:
    """Requests of one caller count together whatever their labels say."""
    service = make_service(policy("p", ANY, limit_keys=["credential"], **LABELS))

    statuses = [send(service, authorization=f"Bearer {SECRET}", x_team=f"team {number}")[0] for number in range(3)]

    assert statuses == [200, 200, 429]


def test_a_label_is_as_long_as_a_row_shows() -> None:
    """What a client sends in it is cut, and bytes that are no UTF-8 are spelled."""
    service = make_service(policy("p", ANY, limit_keys=["credential"], **LABELS))
    send(service, 3, authorization=f"Bearer {SECRET}", x_team="\udcff" + "x" * 500)
    (row,) = report(service)

    assert row["labels"]["x-team"] == "\\udcff" + "x" * 127


def test_sessions_show_them_as_well() -> None:
    """In the report, in events, and on what other replicas are told."""
    document = limited(max_steps=1, session={"keys": ["header:x-session-id"]})
    document["spec"] |= {"limit_keys": ["credential"], **LABELS, "aliases": {HIDDEN: "team-a"}}
    service = make_service(document)
    for content in (b"{}", b"[]"):
        send(service, 1, content, authorization=f"Bearer {SECRET}", x_team="blue", x_session_id="s")
    made = SessionDocument.merge([service.reporter.sessions.make_document(shows_callers=False)], time.time())
    (row,) = report_sessions(View(made, "r", ["r"], ""), Selection(), shows_callers=False, now=time.time())["sessions"]
    events: list[Any] = []
    SessionEvents(lambda *event: events.append(event[2]), lambda: False).look(service.reporter.sessions.copy())

    assert [(shown["alias"], shown["labels"]["x-team"]) for shown in (row, *events)] == [("team-a", "blue")] * 2


def test_a_client_cannot_take_an_alias() -> None:
    """The hash of another's credential in a header is no credential, for people and for orders."""
    service = make_service(policy("p", ANY, limit_keys=[CALLER], aliases={HIDDEN: "team-a"}))
    send(service, 3, x_user_id=HIDDEN)
    send(service, 3, x_user_id=f"credential:{HIDDEN}")
    send(service, 3, authorization=f"Bearer {SECRET}")

    known = sorted((row["alias"] or "", row["credentials"]) for row in report(service))
    assert known == [("", []), ("", []), ("team-a", [HIDDEN])]


@pytest.mark.parametrize(
    "caller",
    [
        "team-a",
        HIDDEN,
        {"credential": HIDDEN},
        {"credential": SECRET},
        {"credential": f"Bearer {SECRET}"},
    ],
    ids=["alias", "secret's hash", "credential's hash", "secret", "bearer token"],
)
def test_operators_name_a_caller_by_what_they_see(caller: object) -> None:
    """By alias, by either hash, and by the secret, which nothing keeps."""
    one = Replicas(1, policy("p", ANY, limit_keys=["credential"], threshold_identical_requests=9, aliases={HIDDEN: "team-a"}))
    given, notes = one.give(kind="block", caller=caller)

    assert notes == []
    assert send(one.services[0]) == [429]
    assert send(one.services[0], authorization="Bearer other") == [200]
    assert SECRET not in str(given)
    assert SECRET.encode() not in write_override(given)


def test_a_credential_is_blocked_under_every_policy() -> None:
    """Whatever else tells callers apart there; the note says how many of them share it."""
    policies = [policy("p", ANY, limit_keys=["credential"]), policy("q", ANY, limit_keys=[CALLER], mode="shadow")]
    policies.append(policy("r", {"pathPrefix": "/v1/"}, limit_keys=["credential", "header:x-team"], mode="shadow"))
    one = Replicas(1, *policies)
    service = one.services[0]
    send(service, 3)
    rows = LoopDocument.merge([service.reporter.loops.make_document(shows_callers=False)], time.time())
    documents = View(rows, "r", ["r"], ""), View(SessionDocument([]), "r", ["r"], ""), View(BudgetDocument([]), "r", ["r"], "")
    seen: Seen = _find_seen(*documents)
    one.givers[0].list_seen = lambda: seen

    assert one.give(kind="block", caller=HIDDEN)[1] == [f"this applies to 2 callers, which share {HIDDEN}"]


def test_an_alias_that_no_policy_has_is_an_error() -> None:
    """It says which there are."""
    one = Replicas(1, policy("p", ANY, limit_keys=["credential"], aliases={HIDDEN: "team-a"}))

    with pytest.raises(BadOrderError, match=r"not 'team-b'; known aliases: team-a$"):
        one.give(kind="block", caller="team-b")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Target(descriptors=(("authorization", hash_descriptor("authorization", HIDDEN)),)), 429),
        (Target(descriptors=(("authorization", hash_descriptor("authorization", f"Bearer {SECRET}")),)), 200),
    ],
)
@pytest.mark.parametrize("more", [[], ["body:/model"]])
def test_an_order_names_a_secret_by_its_hash(target: Target, expected: int, more: list[str]) -> None:
    """Nothing keeps the secret itself, not even a plain hash of it."""
    one = Replicas(
        1, policy("p", ANY, limit_keys=["header:authorization", "header:x-team", *more], threshold_identical_requests=9)
    )
    standing = order(BLOCK, target)
    one.run(one.store.documents.put(ORDERS, "overrides", standing.name, write_override(standing), 60))
    one.refresh()

    assert send(one.services[0]) == [expected]
    assert send(one.services[0], authorization="Bearer other", x_team="blue") == [200]


def test_bad_aliases_and_labels_say_what_would_be_right() -> None:
    """Each at its place."""
    errors = refused(spec(aliases={"abc": "a", HIDDEN: "a b", "0" * 16: HIDDEN}, labels=["body:/team", "team"]))

    assert sorted(pointer for pointer, _ in plain(errors)) == [
        f"/spec/aliases/{key}" for key in sorted(["0" * 16, HIDDEN, "abc"])
    ] + ["/spec/labels/0", "/spec/labels/1"]
