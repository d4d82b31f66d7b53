"""What people say of a canary's new loops: one question per loop, a tally, bounds that hold at every look, a verdict."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.cli.commands.canary import _merge, _print_loop
from extproc.errors import LoopguardError, StoreError
from extproc.ext_proc.service import Service
from extproc.metrics import Metrics
from extproc.operator.canary.answers import AnswerBook
from extproc.operator.canary.certainty import find_least, find_most
from extproc.operator.canary.review import (
    RIGHT,
    UNSURE,
    WRONG,
    Answer,
    ReadAnswers,
    Tally,
    convert_answers,
    count_answers,
    merge_answers,
)
from extproc.operator.canary.verdict import KEEP_WATCHING, SAFE, TOO_STRICT, Evidence, Rules, find_bounds, judge
from extproc.store.memory import MemoryStore
from extproc.store.rules.documents import REVIEWS
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.extent import deepen
from tests.support.messages import body, headers
from tests.support.service import FailingStore, exchange, make_service
from tests.support.turn_writers import Did, as_chat

USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
STUCK = Did((("run", {"cmd": "make"}),), ("make: *** [all] Error 2",))

# --- One loop


def make_reviewed(size: int = 10, **candidate: Any) -> Service:  # noqa: ANN401  # of a policy
    """A service whose canary has a sample of its new loops."""
    live = policy("live", ANY, threshold_identical_requests=9, **USER)
    strict = policy("strict", ANY, mode="shadow", **{"threshold_identical_requests": 2, **USER, **candidate})
    return make_service(live, strict, shadow_samples=size)


def list_loops(service: Service) -> list[dict[str, Any]]:
    """The loops that a person would be asked about."""
    (pair,) = service.pairs.list_pairs()
    assert pair.samples is not None
    return pair.samples.list_kept()


def converse(service: Service, user: str, begin: str, turns: int) -> None:
    """A conversation of a stuck agent, request by request."""
    for end in range(1, turns + 1):
        document = as_chat([STUCK] * end)
        document["messages"] = [{"role": "user", "content": begin}, *document["messages"]]
        exchange(service, headers(x_user_id=user), body(json.dumps(document).encode()))


def test_a_conversation_is_one_loop() -> None:
    """All refusals of a caller's conversation are one question, with the first and the last time, cause, tool and turns."""
    service = make_reviewed(similarity="turns", threshold_identical_requests=3)

    converse(service, "ann", "fix it", 6)

    (loop,) = list_loops(service)
    assert (loop["requests"], loop["tools"], loop["cause"], loop["count"], loop["turns"]) == (4, ["run"], "same_error", 6, 6)
    assert 0 < loop["first"] < loop["last"]
    assert loop["compared"] is None  # texts are not kept
    (pair,) = service.pairs.list_pairs()
    assert (pair.extra, pair.refused_loops.count()) == (4, 1)


def test_other_conversations_and_other_callers_are_other_loops() -> None:
    """Loops differ by caller and conversation, and are those of `/loops?group=conversation`."""
    service = make_reviewed(similarity="turns", threshold_identical_requests=3)

    for user, begin in (("ann", "fix it"), ("ann", "fix that"), ("bob", "fix it")):
        converse(service, user, begin, 4)

    loops = list_loops(service)
    rows = {row.name for row in service.reporter.conversations.copy()}
    assert {(loop["tenant"], loop["conversation"]) for loop in loops} == rows
    assert (len(loops), len({loop["id"] for loop in loops})) == (3, 3)


def test_what_counts_requests_has_a_loop_for_each_fingerprint() -> None:
    """Where no conversation is known, equal requests of one caller are one loop."""
    service = make_reviewed()

    for path in ("/a", "/a", "/a", "/b", "/b"):
        exchange(service, headers(path, end=True, x_user_id="ann"))

    assert [(loop["path"], loop["requests"], loop["count"]) for loop in list_loops(service)] == [("/a", 2, 3), ("/b", 1, 2)]


def test_replicas_sample_the_same_loops() -> None:
    """Which loops are kept depends on the loops alone, so that replicas do not ask about different ones."""
    one, other = make_reviewed(size=3), make_reviewed(size=3)
    for number in range(20):
        for service, user in ((one, f"user-{number}"), (other, f"user-{19 - number}")):
            for _ in range(2):
                exchange(service, headers(end=True, x_user_id=user))

    kept = {loop["id"] for loop in list_loops(one)}
    assert kept == {loop["id"] for loop in list_loops(other)}
    assert len(kept) == 3


def test_a_loop_that_several_replicas_have_seen_is_one_question() -> None:
    """It is shown as its first refusal was, with the refusals of all, and the texts of a replica that keeps them."""
    first = {"first": 1.0, "last": 5.0, "requests": 2, "compared": None, "count": 3, "answers": {"ann": "right"}}
    later = {"first": 2.0, "last": 3.0, "requests": 4, "compared": "run", "count": 9, "answers": {}}

    assert _merge(later, first) == {**first, "requests": 6, "compared": "run"}


@pytest.mark.parametrize(
    ("compared", "limit", "shown"),
    [
        (None, "", "--shadow-sample-bodies"),
        ("", "", "checksums of requests were compared"),
        ("", "max_steps", "what its session used was compared with a limit"),
        ("run | {}", "", "| run | {}"),
    ],
)
def test_a_person_is_shown_what_was_compared_or_how_to_see_it(
    capsys: pytest.CaptureFixture[str], compared: str | None, limit: str, shown: str
) -> None:
    """Texts, or what was compared in their place, or the flag and the command that show them."""
    _print_loop({"first": 0.0, "compared": compared, "limit": limit, "answers": {}})

    assert shown in capsys.readouterr().out


def test_nothing_that_is_shown_commands_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Escape sequences in what clients and other people have written are printed as text."""
    odd = "\x1b[31m\x9b2J\u202e\r"
    _print_loop({odd: odd, "tools": [odd], "compared": f"{odd}\n{odd}", "answers": {odd: odd}})

    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert out.count("\\x1b[31m") == 7


# --- The tally


def say(*answers: str) -> dict[str, Answer]:
    """Answers of as many people about one loop."""
    return {f"person-{number}": Answer(answer, 0.0) for number, answer in enumerate(answers)}


TALLIES: dict[str, tuple[list[dict[str, Answer]], Tally]] = {
    "none": ([], Tally()),
    "one person": ([say(RIGHT), say(WRONG), say(UNSURE)], Tally(1, 1, 1, ("person-0",))),
    "most people decide": ([say(RIGHT, RIGHT, WRONG)], Tally(1, 0, 0, ("person-0", "person-1", "person-2"))),
    "divided": ([say(RIGHT, WRONG)], Tally(0, 0, 1, ("person-0", "person-1"))),
    "an unsure person does not decide": ([say(UNSURE, WRONG)], Tally(0, 1, 0, ("person-0", "person-1"))),
    "a loop without an answer": ([{}, say(RIGHT)], Tally(1, 0, 0, ("person-0",))),
}
"""What people say of several loops, and the tally."""


@pytest.mark.parametrize("case", TALLIES)
def test_each_loop_counts_once(case: str) -> None:
    """However many people answer about a loop, it is right, wrong or unsure."""
    answers, expected = TALLIES[case]

    assert count_answers({str(number): given for number, given in enumerate(answers)}) == expected


def test_the_last_answer_of_a_person_counts_across_stores() -> None:
    """Where servers do not share a store, the newest answer of each person about each loop is used."""
    one = {"a": {"ann": Answer(RIGHT, 1.0)}, "b": {"ann": Answer(RIGHT, 1.0)}}
    other = {"a": {"ann": Answer(WRONG, 2.0), "bob": Answer(RIGHT, 1.0)}}

    expected = {"a": {"ann": Answer(WRONG, 2.0), "bob": Answer(RIGHT, 1.0)}, "b": {"ann": Answer(RIGHT, 1.0)}}
    assert merge_answers([one, other]) == merge_answers([other, one]) == expected


def _fill(book: AnswerBook, *answers: tuple[str, str, str]) -> None:
    async def keep() -> None:
        for loop, person, answer in answers:
            await book.keep("canary", loop, person, Answer(answer, 1.0))

    asyncio.run(keep())


def _read(book: AnswerBook, canary: str = "canary") -> ReadAnswers:
    return asyncio.run(book.read([canary]))[canary]


def test_answers_are_kept_for_each_canary_loop_and_person() -> None:
    """A person's later answer replaces the earlier one; other people, loops and canaries are not touched."""
    book = AnswerBook(MemoryStore(Metrics()))
    _fill(book, ("a", "ann", RIGHT), ("a", "bob", RIGHT), ("b", "ann", UNSURE), ("a", "ann", WRONG))

    found = {loop: {person: answer.answer for person, answer in given.items()} for loop, given in _read(book).items()}
    assert found == {"a": {"ann": WRONG, "bob": RIGHT}, "b": {"ann": UNSURE}}
    assert _read(book, "another") == {}


@pytest.mark.parametrize("document", [b"", b"{}", b'{"answer": "perhaps", "at": 1}', b'{"answer": "right", "at": -1}'])
def test_an_answer_of_an_unknown_version_is_left_out(document: bytes) -> None:
    """What this version does not understand counts as if there were no answer."""
    store = MemoryStore(Metrics())
    asyncio.run(store.documents.put(REVIEWS, "canary:canary", "a ann", document, 60))

    assert _read(AnswerBook(store)) == {}


def test_a_store_that_is_away_has_no_answers() -> None:
    """That is an error, which the pages report as unknown answers."""
    book = AnswerBook(FailingStore(failing="canary", error=StoreError("down", kind="connection")))

    with pytest.raises(StoreError):
        _read(book)


@pytest.mark.parametrize("document", [[], {"canary": []}, {"canary": {"a": {"ann": {"answer": "perhaps", "at": 1}}}}])
def test_a_server_that_answers_something_else_is_told(document: object) -> None:
    """The command says that these are no answers."""
    with pytest.raises(LoopguardError, match="no answers about loops"):
        convert_answers(document)


# --- Certainty


@pytest.mark.parametrize(("part", "whole", "least"), [(33, 34, 0.8164), (20, 20, 0.8011), (19, 19, 0.7920), (3, 3, 0.2557)])
def test_known_bounds(part: int, whole: int, least: float) -> None:
    """For all of n, the bound solves (1 - p^(n+1)) / ((n + 1) (1 - p) p^n) = 20: computed by hand."""
    assert round(find_least(part, whole, 0.95), 4) == least
    assert round(find_most(whole - part, whole, 0.95), 4) == round(1 - least, 4)


@given(st.integers(0, 3_000), st.integers(0, 3_000), st.floats(0, 0.999))
def test_bounds_enclose_the_share(one: int, other: int, confidence: float) -> None:
    """For any counts the bounds are numbers from 0 to 1 on both sides of the share."""
    part, whole = sorted((one, other))

    if whole:
        assert 0 <= find_least(part, whole, confidence) <= part / whole <= find_most(part, whole, confidence) <= 1


def find_error(share: float, looks: int, least: Any) -> float:  # noqa: ANN401  # a function
    """The exact probability that one of so many looks finds the true share too low to be true."""
    alive, wrong = {0: 1.0}, 0.0
    for number in range(1, looks + 1):
        grown: dict[int, float] = {}
        for part, chance in alive.items():
            grown[part] = grown.get(part, 0.0) + chance * (1 - share)
            grown[part + 1] = grown.get(part + 1, 0.0) + chance * share
        alive = {}
        for part, chance in grown.items():
            if least(part, number) > share:
                wrong += chance
            else:
                alive[part] = chance
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("share", deepen([0.02, 0.2, 0.5, 0.8], 0.2))
def test_looking_again_and_again_does_not_make_an_error_likelier(share: float) -> None:
    """The probability of a wrong verdict at any of 120 looks is below 5 %; with a bound for a single look it is far above."""
    assert find_error(share, 120, lambda part, whole: find_least(part, whole, 0.95)) <= 0.05
    assert find_error(share, 120, lambda part, whole: find_bounds(part, whole, 0.90).low) > 0.1


# --- The verdict


def seen(refusals: int, went_on: int, loops: int, **more: Any) -> Evidence:  # noqa: ANN401  # of several types
    """What was counted."""
    return Evidence(refusals, went_on, loops, **more)


def reviewed(right: int, wrong: int, unsure: int = 0, **more: Any) -> Evidence:  # noqa: ANN401  # of several types
    """Loops that people have judged, in traffic that would be too strict without that."""
    loops = right + wrong + unsure
    return Evidence(900, 10_000, loops, tally=Tally(right, wrong, unsure, ("ann",)))._replace(**more)


VERDICTS: dict[str, tuple[Evidence, dict[str, object], str, str, str]] = {
    "nothing yet": (
        seen(0, 0, 0),
        {},
        KEEP_WATCHING,
        "no new loops: keep watching",
        "compared 0 of the 1000 requests that a verdict needs",
    ),
    "one loop of a few requests": (
        seen(9, 20, 1),
        {},
        KEEP_WATCHING,
        "1 new loop, none reviewed: keep watching",
        "compared 20 of the 1000",
    ),
    "certain at once": (
        seen(999, 999, 9),
        {},
        TOO_STRICT,
        "9 new loops, none reviewed: too strict",
        "it begins a new loop in at least 0.",
    ),
    "enough and none": (
        seen(0, 10_000, 0),
        {},
        SAFE,
        "no new loops: safe",
        "it refuses at most 0.038% of the requests that pass today; the limit is 0.100%",
    ),
    "too few to be sure": (seen(0, 2_000, 0), {}, KEEP_WATCHING, "", "it refuses between 0.000% and 0.192%"),
    "on the edge": (seen(10, 10_000, 3), {}, KEEP_WATCHING, "", "it refuses between 0.054% and 0.184%"),
    "too many": (seen(100, 10_000, 3), {}, TOO_STRICT, "", "it refuses at least 0.823%"),
    "more are allowed": (seen(100, 10_000, 3), {"max_new_refusals": 0.02}, SAFE, "", "it refuses at most 1.2"),
    "none is allowed": (seen(1, 10_000, 1), {"max_new_refusals": 0.0}, TOO_STRICT, "", "at least 0.002%"),
    "tenants": (seen(3, 100_000, 3, tenants=3), {"max_new_tenants": 2}, TOO_STRICT, "", "3 new tenants; the limit is 2"),
    "tenants, at once": (seen(3, 3, 3, tenants=3), {"max_new_tenants": 2}, TOO_STRICT, "", "3 new tenants; the limit is 2"),
    "as many tenants": (seen(3, 100_000, 3, tenants=3), {"max_new_tenants": 3}, SAFE, "", ""),
    "sessions": (seen(3, 100_000, 3, sessions=3), {"max_new_sessions": 0}, TOO_STRICT, "", "it refuses 3 new sessions"),
    "less sure": (seen(0, 2_000, 0), {"confidence": 0.5}, SAFE, "", ""),
    "fewer asked for": (seen(5, 10, 1), {"min_requests": 10}, TOO_STRICT, "", ""),
    "an estimate": (seen(9, 100_000, 600, exact=False), {}, SAFE, "about 600 new loops, none reviewed: safe", ""),
    "people find it right": (
        reviewed(33, 1),
        {},
        SAFE,
        "34 new loops, 33 of 34 right: safe",
        "at least 81.6% of the new loops are right to refuse; a safe canary has at least 80.0%",
    ),
    "before the minimum": (reviewed(33, 1, refusals=40, went_on=99), {}, SAFE, "34 new loops, 33 of 34 right: safe", ""),
    "not all are reviewed": (reviewed(20, 0, loops=512), {}, SAFE, "512 new loops, 20 of 20 right: safe", ""),
    "a restart has forgotten loops": (reviewed(33, 1, loops=2), {}, SAFE, "34 new loops, 33 of 34 right: safe", ""),
    "unsure counts against safe": (
        reviewed(32, 0, 2, refusals=0),
        {},
        SAFE,  # by the share of the requests alone
        "34 new loops, 32 of 34 right, 2 unsure: safe",
        "of the new loops are right to refuse; a safe canary has at least 80.0%",
    ),
    "unsure is not wrong": (
        reviewed(0, 0, 9, refusals=0),
        {},
        KEEP_WATCHING,
        "9 new loops, 0 of 9 right, 9 unsure",
        "",
    ),
    "people find it wrong": (
        reviewed(0, 3, refusals=3, went_on=20),
        {"max_new_refusals": 0.5},
        TOO_STRICT,
        "3 new loops, 0 of 3 right: too strict",
        "at most 74.4% of the new loops are right to refuse",
    ),
    "wrong, though it refuses little": (reviewed(2, 9, refusals=11, went_on=10**6), {}, TOO_STRICT, "", "right to refuse"),
    "too few answers": (reviewed(10, 0), {}, KEEP_WATCHING, "10 new loops, 10 of 10 right", "it refuses at least 8.4"),
    "too few answers, of which too many are wrong": (reviewed(6, 4), {}, TOO_STRICT, "", "it refuses at least 8.4"),
    "few and right": (reviewed(3, 0, refusals=9, went_on=10**6), {}, SAFE, "3 new loops, 3 of 3 right: safe", "at most 0.002%"),
    "few and wrong": (reviewed(3, 2, refusals=9, went_on=10**6), {}, KEEP_WATCHING, "", "at most 0.002%"),
    "fewer need be right": (reviewed(10, 0), {"min_right": 0.6}, SAFE, "10 new loops, 10 of 10 right: safe", ""),
    "right, and more tenants than allowed": (
        reviewed(33, 1, tenants=3),
        {"max_new_tenants": 2},
        TOO_STRICT,
        "",
        "3 new tenants",
    ),
    "answers that cannot be read": (
        seen(0, 10_000, 0, tally=None),
        {},
        KEEP_WATCHING,
        "no new loops: keep watching",
        "the answers about its loops cannot be read",
    ),
    "too strict without answers": (seen(100, 10_000, 3, tally=None), {}, TOO_STRICT, "", "it refuses at least 0.823%"),
}
"""What is known; the rules; the verdict, the start of its summary, and a part of a reason."""


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict_follows_the_rules(case: str) -> None:
    """Too strict breaks a rule for certain, safe keeps all of them for certain, and people's answers decide where they can."""
    evidence, rules, word, summary, reason = VERDICTS[case]

    verdict = judge(evidence, Rules(**rules))  # type: ignore[arg-type]  # of several types

    assert verdict.word == word
    assert verdict.summary.startswith(summary)
    assert verdict.summary.endswith(f": {word.replace('_', ' ')}")
    assert any(reason in each for each in verdict.reasons)
