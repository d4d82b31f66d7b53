"""The kinds of state that a Redis store keeps: one Lua file each, what it is asked for one key, and what its answer means.

A script takes any number of keys, and reads and writes all of them in one atomic step; its contract stands on top of its file.
It answers everything that it is asked at once, so that a batch is few calls whatever is in it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from extproc.errors import StoreError
from extproc.store.resp import write_word
from extproc.store.rules import read_script
from extproc.store.rules.chain import ChainLink, Trail, read_trail
from extproc.store.rules.ring import Push, read_entries, split_records
from extproc.store.rules.session import Question, Settlement, Standing, Step, pack_question, read_standing, weigh
from extproc.store.rules.take_back import TakeBack
from extproc.store.rules.windows import UNCOUNTED, Count, Hit

MAX_WEIGHT: Final = 16
"""Of the calls that go as one script, which all other clients of the server have to wait for: it takes 1 ms at worst."""


class Script:
    """One Lua file.

    Attributes:
        sha: the server's name for it.
        by_name: the first words of a command that runs it, for a server that knows it.
        whole: the same for any server, which knows it from then on.
        read: what the server's answer says about a number of calls; raises StoreError where it cannot be this script's answer.
    """

    def __init__(self, name: str, read: Callable[[object, int], list[Any]]) -> None:
        text = read_script(name).encode()
        self.sha = hashlib.sha1(text).hexdigest()  # noqa: S324  # not a secret
        self.by_name = write_word("EVALSHA") + write_word(self.sha)
        self.whole = write_word("EVAL") + write_word(text)
        self.read = read


def _make_error() -> StoreError:
    return StoreError("the server's answer does not match its script", kind="response")


class ScriptCall:
    """What a round trip asks for one key.

    Attributes:
        script: what to run.
        subject: what the store was asked to do; has the key, without the prefix that the store puts before every key.
        arguments: what the script takes for each key.
        owed: of the counts among these, those that this process has answered already.
        others: keys behind the subject's that the script takes as well, in the same hash slot; mostly none.
        weight: what it takes of `MAX_WEIGHT`.
    """

    __slots__ = ("arguments", "others", "owed", "script", "subject", "weight")

    def __init__(  # noqa: PLR0913  # a record
        self,
        script: Script,
        subject: Question | Push | ChainLink,
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
        """The same with the subject's key alone."""
        return ScriptCall(self.script, self.subject, self.arguments, self.owed, (), self.weight)


class CountAnswer:
    """What a script answers for one counter.

    Attributes:
        answer: as every store gives it.
        stands_ms: how long a looping verdict would stand if nothing more were counted, in milliseconds.
    """

    __slots__ = ("answer", "stands_ms")

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
    """A list of strings, one for each call."""
    if not isinstance(reply, list) or len(reply) != calls or set(map(type, reply)) != {bytes}:
        raise _make_error()
    return [read(value) for value in reply]


def _read_ring(value: bytes) -> list[bytes]:
    try:
        records = split_records(value)
    except IndexError:
        raise _make_error() from None
    return read_entries(records)


_RING = Script("ring", partial(_read_each, _read_ring))


def _read_trail(value: bytes) -> Trail:
    try:
        return read_trail(value)
    except IndexError:
        raise _make_error() from None


_CHAIN = Script("chain", partial(_read_each, _read_trail))


def count_call(hit: Hit, times: int = 1, now: int | None = None, owed: int = 0) -> ScriptCall:
    """Count a hit several times at once, and what is owed beside.

    `now` in milliseconds is for tests, None takes the server's clock.
    """
    moment = -1 if now is None else now
    is_log = hit.window_type == "sliding_log"
    last = hit.count_to if is_log else int(hit.window_type == "fixed")
    arguments = (hit.window_ms, hit.threshold, hit.cooldown_ms, int(hit.count_refused), last, times + owed, moment)
    return ScriptCall(_LOG if is_log else _TALLY, hit, arguments, owed)


def _read_standing(value: bytes) -> Standing:
    try:
        return read_standing(value)
    except ValueError:
        raise _make_error() from None


_SESSION = Script("session", partial(_read_each, _read_standing))


def session_call(asked: Step | Settlement, now: int | None = None) -> ScriptCall:
    """Take a step of a session's, or settle one; `now` as for counts."""
    arguments = (-1 if now is None else now, *pack_question(asked))
    if not isinstance(asked, Step):
        return ScriptCall(_SESSION, asked, arguments, weight=1)
    return ScriptCall(_SESSION, asked, arguments, 0, (asked.tenant, asked.shared), weigh(asked))


def _read_nothing(_: bytes) -> Count:
    return UNCOUNTED


_TAKE_BACK = Script("take_back", partial(_read_each, _read_nothing))


def take_back_call(asked: TakeBack) -> ScriptCall:
    """Take a request back from what has counted it."""
    return ScriptCall(_TAKE_BACK, asked, (asked.kind.encode(),))


def push_call(pushed: Push | ChainLink, now: int | None = None) -> ScriptCall:
    """Push an entry to a ring, or a turn to a chain; `now` as for counts."""
    if isinstance(pushed, ChainLink):
        return _link_call(pushed, now)
    _, entry, request, size, ttl = pushed
    return ScriptCall(_RING, pushed, (entry, request, size, ttl, -1 if now is None else now))


def _link_call(link: ChainLink, now: int | None) -> ScriptCall:
    key = link.key
    given = (link.parent != "") + 2 * (link.before != "") + 4 * (link.own != "")
    others = (link.parent or key, link.before or key, link.own or key, link.usage)
    moment = -1 if now is None else now
    arguments = (link.node, link.parent_node, given, link.entry, link.ttl_ms, link.most, link.fresh, moment)
    return ScriptCall(_CHAIN, link, arguments, 0, others, 1)
