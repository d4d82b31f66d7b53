"""The scripts of a Redis store: their Lua files, arguments for one key, and parsed replies.

A script reads and writes any number of keys in one atomic step, so a batch of any size needs few
commands. Its contract is at the top of its file.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from functools import partial
from time import time
from typing import Any, Final

from extproc.errors import StoreError
from extproc.store.pushes import AnyPush
from extproc.store.rules import read_script
from extproc.store.rules.back_to_back import Begin, End
from extproc.store.rules.budget import (
    ALONE,
    ANSWER,
    JOINED,
    MARKED,
    SERVER_CLOCK,
    Take,
    Taken,
    list_arguments,
)
from extproc.store.rules.chain import read_trail
from extproc.store.rules.ring import Push, read_entries, split_records
from extproc.store.rules.root import ROOT_SIZE, RootSearch
from extproc.store.rules.session import (
    Question,
    Settlement,
    Step,
    pack_question,
    read_standing,
    weigh,
)
from extproc.store.rules.take_back import TakeBack
from extproc.store.rules.windows import UNCOUNTED, Count, Hit

MAX_WEIGHT: Final = 16
"""Maximum total weight of calls in one command.

A script blocks the server for all clients: 1 ms at worst.
"""

_TIMES: Final = 1_000
"""A sliding log weighs 1 for each of this many times, many of which may be too old at once."""


def write_word(word: str | int | bytes) -> bytes:
    """Encode one word of a command as a bulk string (RESP)."""
    raw = word if isinstance(word, bytes) else str(word).encode()
    return b"$%d\r\n%b\r\n" % (len(raw), raw)


class Script:
    """One Lua file.

    Attributes:
        sha: the server's name for the script.
        by_name: the start of an EVALSHA command.
        whole: the start of an EVAL command, which also loads the script.
        read: splits the server's reply by calls, given their number; raises StoreError if it is
            malformed.
    """

    def __init__(
        self, name: str, read: Callable[[object, int], list[Any]], parts: tuple[str, ...] = ()
    ) -> None:
        """Read its file, preceded by `parts`."""
        text = "".join([read_script(part) for part in (*parts, name)]).encode()
        self.sha = hashlib.sha1(text).hexdigest()  # noqa: S324  # not a secret
        self.by_name = write_word("EVALSHA") + write_word(self.sha)
        self.whole = write_word("EVAL") + write_word(text)
        self.read = read


def _make_error() -> StoreError:
    return StoreError("the server's answer does not match its script", kind="response")


class ScriptCall:
    """One question in a round trip.

    Attributes:
        script: the script to run.
        subject: the hit, step, push or link; has the key, without the store's prefix.
        arguments: arguments of the script for this key.
        owed: number of the counted hits that this process has already answered.
        others: further keys of the question, in the same hash slot; usually none.
        weight: share of `MAX_WEIGHT`.
    """

    def __init__(  # noqa: PLR0913  # a record
        self,
        script: Script,
        subject: Question | AnyPush,
        arguments: tuple[int | bytes, ...],
        owed: int = 0,
        others: tuple[str, ...] = (),
        weight: int = 0,
    ) -> None:
        self.weight = weight
        self.others = others
        self.owed = owed
        self.script = script
        self.subject = subject
        self.arguments = arguments

    def narrow(self) -> ScriptCall:
        """The same call with only the subject's key."""
        return ScriptCall(self.script, self.subject, self.arguments, self.owed, (), self.weight)


class CountAnswer:
    """A script's answer for a counter, and how long it holds if nothing more is counted."""

    def __init__(self, answer: Count, stands_ms: int) -> None:
        self.answer = answer
        self.stands_ms = stands_ms


_VERDICT: Final = struct.Struct(">QBQQQ")


def _read_verdicts(reply: object, calls: int) -> list[CountAnswer]:
    if not isinstance(reply, bytes) or len(reply) != _VERDICT.size * calls:
        raise _make_error()
    return [
        CountAnswer(Count(count, looping != 0, cooldown, span), stands)
        for count, looping, cooldown, span, stands in _VERDICT.iter_unpack(reply)
    ]


_TALLY = Script("tally", _read_verdicts)
_LOG = Script("sliding_log", _read_verdicts)


def _read_each(read: Callable[[bytes], Any], reply: object, calls: int) -> list[Any]:
    if not isinstance(reply, list) or len(reply) != calls or set(map(type, reply)) != {bytes}:
        raise _make_error()
    try:
        return [read(value) for value in reply]
    except (IndexError, ValueError):
        raise _make_error() from None


_RING = Script("ring", partial(_read_each, lambda value: read_entries(split_records(value))))


_CHAIN = Script("chain", partial(_read_each, read_trail))


def count_call(hit: Hit, times: int = 1, now: int | None = None, owed: int = 0) -> ScriptCall:
    """Count a hit `times` times, and the refusals that are owed.

    `now` in milliseconds is for tests; None uses the server's clock.
    """
    moment = -1 if now is None else now
    is_log = hit.window_type == "sliding_log"
    last = hit.count_to if is_log else int(hit.window_type == "fixed")
    arguments = (
        hit.window_ms,
        hit.threshold,
        hit.cooldown_ms,
        int(hit.count_refused),
        last,
        times + owed,
        moment,
    )
    weight = max(1, last // _TIMES) if is_log else 0
    return ScriptCall(_LOG if is_log else _TALLY, hit, arguments, owed, (), weight)


_SESSION = Script("session", partial(_read_each, read_standing), ("tree", "root"))


def session_call(asked: Step | Settlement, now: int | None = None) -> ScriptCall:
    """Take or settle a step of a session; `now` as in `count_call`."""
    arguments = (-1 if now is None else now, *pack_question(asked))
    if not isinstance(asked, Step):
        return ScriptCall(_SESSION, asked, arguments, weight=1)
    tree, search = asked.tree, asked.search
    others: tuple[str, ...] = (asked.caller,)
    if tree is not None:
        others = (*others, tree.key)
    if search is not None:
        others = (*others, search.key, search.parent_key)
    return ScriptCall(_SESSION, asked, arguments, 0, others, weigh(asked))


def _read_takes(reply: object, calls: int) -> list[Taken]:
    if not isinstance(reply, bytes) or len(reply) != ANSWER.size * calls:
        raise _make_error()
    return [
        Taken(granted, fits, left, wait, start, reset)
        for granted, fits, left, wait, start, reset in ANSWER.iter_unpack(reply)
    ]


_BUDGET: Final = Script("budget", _read_takes)
_MS: Final = 1000
_AHEAD_MS: Final = 60_000
"""A replica's clock may be this much ahead of the server's, which finds the period that follows the
replica's, but not the one before it."""


def take_call(take: Take, now: int | None = None, *, joined: bool = False) -> ScriptCall:
    """Take from a budget, or settle; `joined`: in one group with the call before."""
    if take.arguments and now is None and not joined:  # usually
        return ScriptCall(_BUDGET, take, take.arguments, weight=1)
    moment = SERVER_CLOCK if now is None else now
    take.at(round(time() * _MS) - _AHEAD_MS if now is None else now)
    if take.marker:
        return ScriptCall(_BUDGET, take, list_arguments(take, MARKED, moment), 0, (take.marker,), 1)
    if joined:  # weighs nothing, so that a group stays in one command
        return ScriptCall(_BUDGET, take, list_arguments(take, JOINED, moment))
    return ScriptCall(_BUDGET, take, list_arguments(take, ALONE, moment), weight=1)


_TAKE_BACK = Script("take_back", partial(_read_each, lambda _: UNCOUNTED))


def take_back_call(asked: TakeBack) -> ScriptCall:
    """Take a request back from the counts that include it."""
    return ScriptCall(_TAKE_BACK, asked, (asked.kind.encode(),))


_ONE_COUNT: Final = struct.Struct(">QBQQ")


def _read_counts(reply: object, calls: int) -> list[Count]:
    if not isinstance(reply, bytes) or len(reply) != _ONE_COUNT.size * calls:
        raise _make_error()
    return [
        Count(count, looping != 0, cooldown, span)
        for count, looping, cooldown, span in _ONE_COUNT.iter_unpack(reply)
    ]


_BACK_TO_BACK: Final = Script("back_to_back", _read_counts)
_BEGINS: Final = -3


def interval_call(asked: Begin | End, now: int | None = None) -> ScriptCall:
    """Note that a request begins or has ended; `now` as in `count_call`."""
    moment = -1 if now is None else now
    if isinstance(asked, End):
        last: tuple[int, ...] = (asked.lasted_ms, asked.window_ms, 0, 0)
    else:
        last = (_BEGINS, asked.window_ms, asked.threshold, asked.cooldown_ms)
    return ScriptCall(_BACK_TO_BACK, asked, (asked.name, *last, moment), weight=1)


_ROOTS = Script("roots", partial(_read_each, lambda value: [_check_root(value)]), ("root",))


def _check_root(value: bytes) -> bytes:
    if len(value) != ROOT_SIZE:
        raise ValueError
    return value


def push_call(pushed: AnyPush, now: int | None = None) -> ScriptCall:
    """Push an entry to a ring, or a turn to a chain, or find a root; `now` as in `count_call`."""
    moment = -1 if now is None else now
    if isinstance(pushed, RootSearch):
        return ScriptCall(_ROOTS, pushed, (pushed.parent, pushed.ttl_ms), 0, (pushed.parent_key,))
    if isinstance(pushed, Push):
        return ScriptCall(
            _RING, pushed, (pushed.entry, pushed.request, pushed.size, pushed.ttl_ms, moment)
        )
    key, parents = pushed.key, pushed.parents
    ends = (pushed.before, pushed.own, pushed.answer)
    others = (pushed.usage, *[end or key for end in ends], *parents)
    arguments: tuple[int | bytes, ...] = (
        pushed.node,
        len(parents),
        pushed.near,
        *[int(end != "") for end in ends],
        pushed.entry,
        pushed.ttl_ms,
        pushed.most,
        pushed.fresh,
        moment,
    )
    return ScriptCall(_CHAIN, pushed, arguments, 0, others, 1)
