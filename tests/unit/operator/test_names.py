"""A caller has one name under every policy, with aliases and labels beside it."""

import logging
import time
from typing import Any

import pytest

from extproc.cli.commands import write_caller
from extproc.engine.orders import BLOCK, Target, hash_descriptor
from extproc.operator.admin.reports import Selection, matches
from extproc.operator.overrides import write_override
from extproc.operator.row_events import LoopEvents, SessionEvents
from extproc.request.hash_key import PROCESS_KEY
from tests.support.bundles import plain, refused, spec
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.operated import Operated, send
from tests.support.orders import order
from tests.support.service import exchange
from tests.support.session_limits import limited

SECRET = "sk-secret"
HIDDEN = PROCESS_KEY.hide(SECRET)
KEYED: dict[str, Any] = {"authorization": f"Bearer {SECRET}"}
SENT: dict[str, Any] = {**KEYED, "x_team": "blue"}
NAMED: dict[str, Any] = {"x_user_id": "ann"}
ALTERNATIVES = {"first_of": ["jwt:sub", "credential", "header:x-user-id"], "name": "caller"}
OWN_KEYS: list[list[Any]] = [
    ["credential"],
    ["header:authorization"],
    [ALTERNATIVES],
    [ALTERNATIVES, "credential"],
]
BY_CREDENTIAL: dict[str, Any] = {"limit_keys": ["credential"]}
ALIASES: dict[str, Any] = {"aliases": {HIDDEN: "team-a"}}
LABELS: dict[str, Any] = {"labels": ["header:x-team", "header:authorization"]}


def budget(name: str, limit_keys: list[Any], by: str = "header:x-user-id") -> dict[str, Any]:
    """A policy with a budget of two requests, whose rule has other keys than the policy."""
    algorithm = {
        "algorithm": "token_bucket",
        "algorithm_config": {"tokens_per_second": 0.001, "burst": 2},
    }
    made = policy(name, ANY, limit_keys=[by])
    del made["spec"]["loop_detection"]
    made["spec"]["rules"] = [{"name": "few", "limit_keys": limit_keys, **algorithm}]
    return made


def list_rows(made: Operated) -> list[dict[str, Any]]:
    loops = [loop for row in made.ask("/loops")["conversations"] for loop in row["loops"]]
    return [*loops, *made.ask("/sessions")["sessions"], *made.ask("/budgets")["budgets"]]


def write_id(value: object) -> str:
    """A case's name, which must be the same in all processes."""
    return str(value).replace(HIDDEN, "hidden")


@pytest.mark.parametrize(
    ("keys", "sent", "name"),
    [
        *((keys, KEYED, HIDDEN) for keys in OWN_KEYS),
        ([ALTERNATIVES], NAMED, hash_descriptor("x-user-id", "ann")),
        (["header:x-user-id"], NAMED, hash_descriptor("x-user-id", "ann")),
    ],
    ids=write_id,
)
def test_limit_key_has_one_name_on_all_pages(
    keys: list[Any], sent: dict[str, Any], name: str
) -> None:
    session = limited(max_steps=9, session={"keys": ["header:x-session-id"]})
    session["spec"] |= {"limit_keys": keys}
    one = Operated(
        policy("loops", ANY, limit_keys=keys), session, budget("money", keys, by=keys[-1])
    )
    send(one.service, 3, **sent, x_session_id="s")

    rows = list_rows(one)
    assert (len({row["policy"] for row in rows}), {row["caller"] for row in rows}) == (3, {name})


def test_equal_values_of_two_sources_are_two_callers() -> None:
    keys = [{"first_of": ["query:team", "header:team"], "name": "caller"}]
    one = Operated(policy("a", ANY, limit_keys=keys, threshold_identical_requests=2))
    send(one.service, 2, team="red")
    for _ in range(2):
        exchange(one.service, headers("/v1/x?team=red"), body(b"{}"))

    assert len({row["caller"] for row in list_rows(one)}) == 2


@pytest.mark.parametrize("shown", ["loops", "money"])
def test_order_by_any_rows_hash_frees_every_policy(shown: str) -> None:
    live = [policy("loops", ANY, limit_keys=[ALTERNATIVES]), budget("money", ["credential"])]
    one = Operated(*live, policy("other", ANY, limit_keys=["header:x-team"], mode="shadow"))
    assert send(one.service, 3, **KEYED)[-1] == 429
    row = next(row for row in list_rows(one) if row["policy"] == shown)

    given, notes = one.give(kind="allow", caller=row["caller"])

    assert given["meets"] == ["loops", "money"]
    assert [
        note.startswith("this applies to loops, money, but not to other, which") for note in notes
    ] == [True]
    assert send(one.service, 3, **KEYED) == [200] * 3
    assert one.give(kind="block", tool="deploy")[0].get("meets") is None


@pytest.mark.parametrize("kind", ["block", "allow", "release"])
def test_order_takes_the_hash_of_a_rules_caller(kind: str) -> None:
    one = Operated(
        budget("money", ["header:x-team"]), budget("more", ["credential"], by="credential")
    )
    named = {**NAMED, "x_team": "red"}
    assert send(one.service, 3, **named) == [200, 200, 429]
    row = next(row for row in list_rows(one) if row["policy"] == "money")

    given, notes = one.give(kind=kind, caller=row["caller"])

    assert given["meets"] == ["money"]
    assert [note.startswith("this applies to money, but not to more") for note in notes] == [True]
    assert send(one.service, 1, **named) == [400 if kind == "block" else 200]
    assert send(one.service, 1, x_user_id="ann", x_team="blue") == [200]


def test_release_of_one_rule_leaves_other_budgets() -> None:
    made = budget("money", ["header:x-team"])
    made["spec"]["rules"].append(
        {**made["spec"]["rules"][0], "name": "each", "limit_keys": ["header:x-user-id"]}
    )
    one = Operated(made)
    send(one.service, 3, x_user_id="ann", x_team="red")
    team = hash_descriptor("x-team", "red")
    one.give(kind="release", caller=team)

    assert send(one.service, 1, x_user_id="ann", x_team="red") == [429]
    assert send(one.service, 3, x_user_id="bob", x_team="red") == [200, 200, 429]


def test_order_by_key_meets_all_its_users() -> None:
    keys = ["credential", "header:x-user-id"]
    one = Operated(
        policy("loops", ANY, limit_keys=keys),
        policy("all", {"pathExact": "/o"}, limit_keys=["credential"]),
    )
    for user in ("ann", "bob"):
        send(one.service, 3, **KEYED, x_user_id=user)
    rows = list_rows(one)
    assert len({row["caller"] for row in rows}) == 2
    assert all(matches(row, Selection(caller=HIDDEN)) for row in rows)

    given, notes = one.give(kind="allow", caller=HIDDEN)

    assert given["meets"] == ["loops"]
    assert notes[0] == f"this applies to 2 callers, which share {HIDDEN}"
    assert send(one.service, **KEYED, x_user_id="bob") == [200]


@pytest.mark.parametrize(
    ("keys", "caller", "sent"),
    [
        *(
            (keys, caller, KEYED)
            for keys in OWN_KEYS
            for caller in (
                HIDDEN,
                *({"credential": text} for text in (SECRET, f"Bearer {SECRET}", HIDDEN)),
            )
        ),
        *(
            (keys, {name: f"Bearer {SECRET}"}, KEYED)
            for keys in OWN_KEYS
            for name in ("authorization", "header:authorization")
        ),
        *(
            ([ALTERNATIVES], {"caller": f"credential:{secret}"}, KEYED)
            for secret in (SECRET, HIDDEN)
        ),
        *(([ALTERNATIVES], {name: "ann"}, NAMED) for name in ("x-user-id", "header:x-user-id")),
        ([ALTERNATIVES], {"caller": "header:x-user-id:ann"}, NAMED),
        (["credential"], "team-a", KEYED),
    ],
    ids=write_id,
)
def test_order_takes_alias_hash_value_or_secret(
    keys: list[Any],
    caller: Any,  # noqa: ANN401  # as JSON
    sent: dict[str, Any],
) -> None:
    loop: dict[str, Any] = {"threshold_identical_requests": 2, "action": "warn"}
    one = Operated(policy("loops", ANY, limit_keys=keys, **loop, **ALIASES))
    send(one.service, 2, **sent)

    given, notes = one.give(kind="block", caller=caller)

    assert (given["meets"], notes) == (["loops"], [])
    assert send(one.service, **sent) == [429]
    assert send(one.service, authorization="Bearer other") == [200]
    assert SECRET not in str(given)
    assert SECRET.encode() not in one.read_orders()


# What people are shown


def list_loops(made: Operated, caller: str = "") -> list[dict[str, Any]]:
    return [
        loop for row in made.ask("/loops", caller=caller)["conversations"] for loop in row["loops"]
    ]


def test_alias_and_labels_are_shown_with_the_hash(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    made = Operated(
        policy("p", ANY, **BY_CREDENTIAL, **LABELS), policy("other", {"pathExact": "/o"}, **ALIASES)
    )
    service = made.service
    send(service, 3, **SENT)
    events: list[Any] = []
    LoopEvents(lambda *event: events.append(event[2]), lambda: False).look(
        service.reporter.loops.list_loops(), time.time()
    )
    (row,), (line,), (event,) = (
        list_loops(made),
        [vars(record)["fields"] for record in caplog.records],
        events,
    )
    labels = {"x-team": "blue", "authorization": HIDDEN}

    assert [(shown["alias"], shown["labels"]) for shown in (row, line, event)] == [
        ("team-a", labels)
    ] * 3
    assert (row["caller"], row["credentials"], row["descriptors"]) == (HIDDEN, [HIDDEN], None)
    assert write_caller(row) == f"team-a (x-team: blue, authorization: {HIDDEN})"
    chosen = ("team-a", "blue", HIDDEN, HIDDEN[:5], "team-b")
    assert [len(list_loops(made, name)) for name in chosen] == [1, 1, 1, 1, 0]
    assert SECRET not in f"{row}{line}{event}"


def test_labels_are_cut_and_separate_no_callers() -> None:
    made = Operated(policy("p", ANY, **BY_CREDENTIAL, **LABELS))

    statuses = [
        send(made.service, **KEYED, x_team=team)[0] for team in ("a", "b", "\udcff" + "x" * 500)
    ]

    assert statuses == [200, 200, 429]
    assert list_loops(made)[0]["labels"]["x-team"] == "\\udcff" + "x" * 127


def test_sessions_show_alias_and_labels() -> None:
    document = limited(max_steps=1, session={"keys": ["header:x-session-id"]})
    document["spec"] |= {"limit_keys": ["credential"], **LABELS, **ALIASES}
    made = Operated(document)
    for content in (b"{}", b"[]"):
        send(made.service, 1, content, **SENT, x_session_id="s")
    (row,) = made.ask("/sessions")["sessions"]
    events: list[Any] = []
    SessionEvents(lambda *event: events.append(event[2]), lambda: False).look(
        made.service.reporter.sessions.copy()
    )

    assert [(shown["alias"], shown["labels"]["x-team"]) for shown in (row, *events)] == [
        ("team-a", "blue")
    ] * 2


def test_client_cannot_claim_an_alias() -> None:
    made = Operated(policy("p", ANY, limit_keys=[ALTERNATIVES], **ALIASES))
    send(made.service, 3, x_user_id=HIDDEN)
    send(made.service, 3, x_user_id=f"credential:{HIDDEN}")
    send(made.service, 3, **KEYED)

    known = sorted((row["alias"] or "", row["credentials"]) for row in list_loops(made))
    assert known == [("", []), ("", []), ("team-a", [HIDDEN])]


def test_unknown_alias_is_an_error_with_known_ones() -> None:
    one = Operated(policy("p", ANY, **BY_CREDENTIAL, **ALIASES))

    status, answer = one.post({"kind": "block", "caller": "team-b"})

    assert (status, answer["error"].endswith("not 'team-b'; known aliases: team-a")) == (400, True)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Target(descriptors=(("authorization", hash_descriptor("authorization", HIDDEN)),)), 429),
        (
            Target(
                descriptors=(
                    ("authorization", hash_descriptor("authorization", f"Bearer {SECRET}")),
                )
            ),
            200,
        ),
    ],
)
@pytest.mark.parametrize("more", [[], ["body:/model"]])
def test_order_by_secret_keeps_only_a_keyed_hash(
    target: Target, expected: int, more: list[str]
) -> None:
    one = Operated(
        policy(
            "p",
            ANY,
            limit_keys=["header:authorization", "header:x-team", *more],
            threshold_identical_requests=9,
        )
    )
    standing = order(BLOCK, target)
    one.put_order(standing.name, write_override(standing))

    assert send(one.service, **SENT) == [expected]
    assert send(one.service, 1, authorization="Bearer other", x_team="blue") == [200]


def test_invalid_aliases_and_labels_are_reported_in_place() -> None:
    errors = refused(
        spec(aliases={"abc": "a", HIDDEN: "a b", "0" * 16: HIDDEN}, labels=["body:/team", "team"])
    )

    assert sorted(pointer for pointer, _ in plain(errors)) == [
        f"/spec/aliases/{key}" for key in sorted(["0" * 16, HIDDEN, "abc"])
    ] + ["/spec/labels/0", "/spec/labels/1"]
