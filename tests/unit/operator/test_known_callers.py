"""What stands beside a caller's hash for people, and how operators name callers whose descriptors are hashes of secrets."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from extproc.cli.commands import write_caller
from extproc.engine.orders import BLOCK, Target, hash_descriptor
from extproc.operator.events import LoopEvents, SessionEvents
from extproc.operator.overrides import write_override
from extproc.request.hash_key import PROCESS_KEY
from tests.support.bundles import plain, refused, spec
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.operated import Operated, send
from tests.support.orders import order
from tests.support.service import make_service
from tests.support.session_limits import limited

SECRET = "sk-secret"
HIDDEN = PROCESS_KEY.hide(SECRET)
SENT: dict[str, Any] = {"authorization": f"Bearer {SECRET}", "x_team": "blue"}
CALLER = {"first_of": ["credential", "header:x-user-id"], "name": "caller"}
LABELS: dict[str, Any] = {"labels": ["header:x-team", "header:authorization"]}


def list_loops(made: Operated, caller: str = "") -> list[dict[str, Any]]:
    """The loops behind the rows of `/loops`, as a stranger sees them."""
    return [loop for row in made.ask("/loops", caller=caller)["conversations"] for loop in row["loops"]]


def test_alias_and_labels_stand_beside_the_hash(caplog: pytest.LogCaptureFixture) -> None:
    """In rows, logs, events and commands; callers are chosen by them; the secret is in none, as a label neither."""
    caplog.set_level(logging.WARNING)
    made = Operated(
        policy("p", ANY, limit_keys=["credential"], **LABELS), policy("other", {"pathExact": "/o"}, aliases={HIDDEN: "team-a"})
    )
    service = made.service
    send(service, 3, **SENT)
    events: list[Any] = []
    LoopEvents(lambda *event: events.append(event[2]), lambda: False).look(service.reporter.loops.copy(), time.time())
    (row,), (line,), (event,) = list_loops(made), [vars(record)["fields"] for record in caplog.records], events
    labels = {"x-team": "blue", "authorization": HIDDEN}

    assert [(shown["alias"], shown["labels"]) for shown in (row, line, event)] == [("team-a", labels)] * 3
    assert (row["caller"], row["credentials"], row["descriptors"]) == (HIDDEN, [HIDDEN], None)
    assert write_caller(row) == f"team-a (x-team: blue, authorization: {HIDDEN})"
    chosen = ("team-a", "blue", HIDDEN, HIDDEN[:5], "team-b")
    assert [len(list_loops(made, name)) for name in chosen] == [1, 1, 1, 1, 0]
    assert SECRET not in f"{row}{line}{event}"


def test_labels_count_for_nothing() -> None:
    """Requests of one caller count together whatever their labels say."""
    service = make_service(policy("p", ANY, limit_keys=["credential"], **LABELS))

    statuses = [send(service, 1, authorization=f"Bearer {SECRET}", x_team=f"team {number}")[0] for number in range(3)]

    assert statuses == [200, 200, 429]


def test_a_label_is_as_long_as_a_row_shows() -> None:
    """What a client sends in it is cut, and bytes that are no UTF-8 are spelled."""
    made = Operated(policy("p", ANY, limit_keys=["credential"], **LABELS))
    send(made.service, 3, authorization=f"Bearer {SECRET}", x_team="\udcff" + "x" * 500)
    (row,) = list_loops(made)

    assert row["labels"]["x-team"] == "\\udcff" + "x" * 127


def test_sessions_show_them_as_well() -> None:
    """In the report, in events, and on what other replicas are told."""
    document = limited(max_steps=1, session={"keys": ["header:x-session-id"]})
    document["spec"] |= {"limit_keys": ["credential"], **LABELS, "aliases": {HIDDEN: "team-a"}}
    made = Operated(document)
    for content in (b"{}", b"[]"):
        send(made.service, 1, content, **SENT, x_session_id="s")
    (row,) = made.ask("/sessions")["sessions"]
    events: list[Any] = []
    SessionEvents(lambda *event: events.append(event[2]), lambda: False).look(made.service.reporter.sessions.copy())

    assert [(shown["alias"], shown["labels"]["x-team"]) for shown in (row, *events)] == [("team-a", "blue")] * 2


def test_a_client_cannot_take_an_alias() -> None:
    """The hash of another's credential in a header is no credential, for people and for orders."""
    made = Operated(policy("p", ANY, limit_keys=[CALLER], aliases={HIDDEN: "team-a"}))
    send(made.service, 3, x_user_id=HIDDEN)
    send(made.service, 3, x_user_id=f"credential:{HIDDEN}")
    send(made.service, 3, authorization=f"Bearer {SECRET}")

    known = sorted((row["alias"] or "", row["credentials"]) for row in list_loops(made))
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
    loop: dict[str, Any] = {"threshold_identical_requests": 2, "action": "warn", "limit_keys": ["credential"]}
    one = Operated(policy("p", ANY, **loop, aliases={HIDDEN: "team-a"}))
    send(one.service, 2, **SENT)

    given, notes = one.give(kind="block", caller=caller)

    assert notes == []
    assert send(one.service, **SENT) == [429]
    assert send(one.service, 1, authorization="Bearer other") == [200]
    assert SECRET not in str(given)
    assert SECRET.encode() not in one.read_orders()


def test_a_credential_is_blocked_under_every_policy() -> None:
    """Whatever else tells callers apart there; the note says how many of them share it."""
    policies = [policy("p", ANY, limit_keys=["credential"]), policy("q", ANY, limit_keys=[CALLER], mode="shadow")]
    policies.append(policy("r", {"pathPrefix": "/v1/"}, limit_keys=["credential", "header:x-team"], mode="shadow"))
    one = Operated(*policies)
    send(one.service, 3, **SENT)

    assert one.give(kind="block", caller=HIDDEN)[1] == [f"this applies to 2 callers, which share {HIDDEN}"]


def test_an_alias_that_no_policy_has_is_an_error() -> None:
    """It says which there are."""
    one = Operated(policy("p", ANY, limit_keys=["credential"], aliases={HIDDEN: "team-a"}))

    status, answer = one.post({"kind": "block", "caller": "team-b"})

    assert (status, answer["error"].endswith("not 'team-b'; known aliases: team-a")) == (400, True)


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
    one = Operated(
        policy("p", ANY, limit_keys=["header:authorization", "header:x-team", *more], threshold_identical_requests=9)
    )
    standing = order(BLOCK, target)
    one.put_order(standing.name, write_override(standing))

    assert send(one.service, **SENT) == [expected]
    assert send(one.service, 1, authorization="Bearer other", x_team="blue") == [200]


def test_bad_aliases_and_labels_say_what_would_be_right() -> None:
    """Each at its place."""
    errors = refused(spec(aliases={"abc": "a", HIDDEN: "a b", "0" * 16: HIDDEN}, labels=["body:/team", "team"]))

    assert sorted(pointer for pointer, _ in plain(errors)) == [
        f"/spec/aliases/{key}" for key in sorted(["0" * 16, HIDDEN, "abc"])
    ] + ["/spec/labels/0", "/spec/labels/1"]
