"""Judges the calls of a conversation one by one, with the detector `turns` of the preset `agents`.

A live request contains all turns so far, of which the detector reads the newest 32. Here each turn
is read once, from a body with the messages that a client would have sent. Loops are found in the
collected turns, by the same code as for a request. `tests/unit/cli/scan` compares both.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from typing import NamedTuple

import msgspec

from extproc.apis import LIST_PATHS
from extproc.apis.excerpt import Excerpt
from extproc.apis.messages import CALL
from extproc.cli.packed import FilePlace
from extproc.cli.scan.transcripts import About, ModelCall, cut_name
from extproc.decision import STRONG, Action, Repeat
from extproc.detectors.history import USUAL_TURNS, History
from extproc.detectors.loops import CYCLE, ERROR, REPEAT, RESULT
from extproc.detectors.turn import AnyTurn, Turn
from extproc.detectors.turns import Turns
from extproc.engine.engine import Engine
from extproc.engine.reading import make_excerpt
from extproc.policy.loader import load
from extproc.policy.presets import DEFAULT_PRESET, find_preset
from extproc.request.document import INSPECTION, Document, NotCounted
from extproc.sessions.rates import Rates

_LARGE = 2**18
"""Turns of more bytes are stored as hashes."""

_MOST_AGAIN = 4 * USUAL_TURNS
"""Maximum number of messages to read again with the next answer."""

_MOST_IDENTIFIED = 100_000
_MOST_NANOS = 2**63 - 1
IDENTIFIED = 4
"""Numbers per call in `RunReport.calls`."""

_STOPS = frozenset({Action.REJECT})
_SHOWN = 400
_MOST_SHOWN = 10
_MOST_TOOLS = 1_000
_ANY_TOOL = b',"tools":[{"name":"any"}]'


class Spent(NamedTuple):
    """Calls and their cost.

    Attributes:
        calls: number of calls.
        tokens: their tokens of all kinds.
        nanos: their known cost, in nano-dollars.
        unpriced: tokens of calls without a known price.
    """

    calls: int = 0
    tokens: int = 0
    nanos: int = 0
    unpriced: int = 0

    def plus(self, other: Spent) -> Spent:
        return Spent(*[one + another for one, another in zip(self, other, strict=True)])

    def minus(self, *others: Spent) -> Spent:
        return Spent(*[one - sum(parts) for one, *parts in zip(self, *others, strict=True)])


class ShownTurn(NamedTuple):
    """A repeated turn: hash and length of its action and result, and its content with `--show`."""

    action: str
    action_bytes: int
    result: str
    result_bytes: int
    text: str


class _Origin(NamedTuple):
    number: int
    call: ModelCall  # the call that made a turn


class FoundLoop(msgspec.Struct):
    """A loop in a conversation. Calls are numbered from 1 on.

    Attributes:
        rule: the detector's rule.
        tools: the tools that repeat.
        what: a description of what repeats.
        strong: whether the evidence is an error or a long result.
        begins: number of the first repeated call.
        time: time of that call, in milliseconds since 1970; 0 if unknown.
        place: place of that call.
        ends: number of the last call in the loop.
        ended: time of that call.
        noted: number of the first call with a note, or 0.
        landed: number of the first call that must be the final answer, or 0.
        stopped: number of the first refused call, or 0.
        after_note: calls in the loop from `noted` on.
        after_stop: calls in the loop from `stopped` on.
        turns: the repeated turns, at most 10.
    """

    rule: str
    tools: tuple[str, ...]
    what: str
    strong: bool
    begins: int
    time: int
    place: FilePlace
    ends: int = 0
    ended: int = 0
    noted: int = 0
    landed: int = 0
    stopped: int = 0
    after_note: Spent = Spent()
    after_stop: Spent = Spent()
    turns: list[ShownTurn] = []


class RunReport(msgspec.Struct):
    """The result of one conversation.

    Attributes:
        about: whose conversation it is.
        place: place of the first call.
        first: time of the first call, in milliseconds since 1970; 0 if unknown.
        last: time of the last call.
        spent: the cost of all calls.
        estimated: whether some tokens are estimated.
        loops: its loops.
        unread: number of calls that could not be judged, by reason.
        calls: four numbers per call: identity, and tokens, nanos and unpriced tokens as in `Spent`.
            Empty if no call has an identity; only the first calls of very long conversations.
        tools: number of calls by tool, for the first 1,000 tools.
    """

    about: About
    place: FilePlace
    first: int = 0
    last: int = 0
    spent: Spent = Spent()
    estimated: bool = False
    loops: list[FoundLoop] = []
    unread: dict[str, int] = msgspec.field(default_factory=dict)
    calls: array[int] = msgspec.field(default_factory=lambda: array("q"))
    tools: dict[str, int] = msgspec.field(default_factory=dict)


class Judging:
    """Shared by all conversations: the detector, prices, and whether to show contents."""

    def __init__(self, *, show: bool) -> None:
        engine = Engine(load([find_preset(DEFAULT_PRESET)], datetime.now(UTC)), datetime.now(UTC))
        self.detector, self.turns = next(
            (each, each.similarity)
            for each in engine.plans[0].detectors
            if isinstance(each.similarity, Turns)
        )
        self.rates = Rates({}, None)
        self.show = show

    def find_unread(self, body: bytes) -> str:
        """Why the detector cannot judge a request with this body, or empty."""
        most = self.detector.max_inspect_bytes
        document = (
            Document(body) if len(body) <= most else make_excerpt(Excerpt(LIST_PATHS, most), body)
        )
        if document is None:
            return "inspect_limit"
        try:
            self.turns.compare(document)
        except NotCounted as why:
            return why.reason
        return ""

    def price(self, call: ModelCall) -> Spent:
        tokens = sum(call.usage)
        if call.dollars is not None:
            return Spent(1, tokens, round(call.dollars * 1e9), 0)
        nanos = self.rates.find_known_cost(call.model, call.usage)
        return Spent(1, tokens, nanos or 0, tokens if nanos is None else 0)


class Watch:
    """Judges one conversation; `about` may change until the first call."""

    def __init__(
        self,
        judging: Judging,
        about: About,
        key: str,
        done: Callable[[RunReport], None],
        *,
        tools: bool,
    ) -> None:
        self._judging = judging
        self._done = done
        self._opening = b'{"%b":[' % key.encode()
        self._ending = b"]%b}" % (_ANY_TOOL if tools else b"")
        # Newest first; or why one is unreadable
        self._turns: deque[AnyTurn | NotCounted] = deque(maxlen=USUAL_TURNS)
        # Of these turns; None for copies
        self._origins: deque[_Origin | None] = deque(maxlen=USUAL_TURNS)
        self._called: deque[list[str]] = deque(maxlen=USUAL_TURNS)  # tools called in these turns
        self._tools: Counter[str] = Counter()
        self._newest: _Origin | None = None
        self._recent: list[bytes] = []  # the messages added last
        self._added = 0  # number of turns in them
        self._unanswered = False
        self._before: list[Spent] = [Spent(), Spent()]
        self._report: RunReport | None = None
        self._identified = False
        self.about = about

    @property
    def is_asked(self) -> bool:
        return self._report is not None

    def restart(self) -> None:
        """Drop the history, which was replaced by a summary."""
        self._turns.clear()
        self._origins.clear()
        self._called.clear()
        self._recent, self._added, self._unanswered = [], 0, False

    def replace(self, body: bytes) -> None:
        """Replace all turns with those of a whole request."""
        origins = [self._newest, *self._origins]
        self.restart()
        self._take(body)
        self._origins = deque((origins + [None] * USUAL_TURNS)[: len(self._turns)], USUAL_TURNS)

    def add(self, messages: Sequence[bytes]) -> None:
        """Add an answer and the messages after it, in an API's form.

        Some messages must be read together with those before them: an answer without messages after
        it may be a thought of the next one, and messages after an empty answer belong to the answer
        before it.
        """
        if self._unanswered or (not self._add(messages) and self._recent):
            self._add_again(messages)

    def _add(self, messages: Sequence[bytes]) -> bool:
        """Add the turns in these messages; returns whether there are any."""
        newest = self._take(self._opening + b",".join(messages) + self._ending)
        if newest is None:
            return False
        few = len(messages) <= _MOST_AGAIN and sum(map(len, messages)) <= _LARGE
        self._recent = list(messages) if few else []
        self._unanswered = few and not newest.answered
        return True

    def _add_again(self, messages: Sequence[bytes]) -> None:
        """Read the messages again, together with those before them."""
        count = min(self._added, len(self._turns))
        for _ in range(count):
            self._turns.popleft()
            self._origins.popleft()
        called = [name for _ in range(count) for name in self._called.popleft()]
        self._tools.subtract(called)
        self._unanswered = False
        # The earlier ones become unreadable, too, as live
        if not self._add([*self._recent, *messages]):
            self._tools.update(called)

    def _take(self, data: bytes) -> Turn | None:
        """Add the turns in a body; returns the newest."""
        try:
            read = self._judging.turns.rule.read(Document(data)).newest(USUAL_TURNS)
        except NotCounted as why:
            self._turns.appendleft(why.renew())
            self._origins.appendleft(self._newest)
            self._called.appendleft([])
            self._recent, self._added = [], 0
            return None
        for turn in reversed(read):
            names = _list_calls(turn)
            self._called.appendleft(names)
            self._tools.update(
                name for name in names if name in self._tools or len(self._tools) < _MOST_TOOLS
            )
            kept: AnyTurn = turn
            if len(data) > _LARGE and isinstance(turn, Turn):
                with suppress(NotCounted):
                    kept = turn.reduce()
            self._turns.appendleft(kept)
            self._origins.appendleft(self._newest)
        self._added = len(read) or self._added
        return read[0] if read and isinstance(read[0], Turn) else None

    def ask(self, call: ModelCall, unread: str = "") -> None:
        """Record a call with the messages so far; `unread` is why it cannot be judged."""
        report = self._report = self._report or RunReport(self.about, call.place, call.time)
        before = report.spent
        price = self._judging.price(call)
        report.spent = before.plus(price)
        self._identified = self._identified or call.identity > 0
        if len(report.calls) < _MOST_IDENTIFIED * IDENTIFIED:
            report.calls.extend(
                (call.identity, price.tokens, min(price.nanos, _MOST_NANOS), price.unpriced)
            )
        report.estimated = report.estimated or call.estimated
        if call.time:
            report.first, report.last = (
                min(report.first or call.time, call.time),
                max(report.last, call.time),
            )
        found, history = self.judge(report, unread)
        if found is not None:
            self._note(report, call, found, history, before)
        self._newest = _Origin(report.spent.calls, call)

    def close(self) -> None:
        if self._report is not None:
            if not self._identified:
                del self._report.calls[:]
            self._report.tools = dict(+self._tools)
            self._done(self._report)
            self._report = None

    def judge(self, report: RunReport, unread: str = "") -> tuple[Repeat | None, History]:
        """The loop in the next request, and its history; `unread` as in `ask`."""
        history = History(self._list_turns())
        INSPECTION.begin()
        try:
            if not unread:
                return self._judging.turns.find_loop(history), history
        except NotCounted as why:
            unread = why.reason
        report.unread[unread] = report.unread.get(unread, 0) + 1
        return None, history

    def _list_turns(self) -> Iterator[AnyTurn]:
        """The turns, newest first; raises NotCounted at an unreadable one."""
        for turn in self._turns:
            if isinstance(turn, NotCounted):
                raise turn.renew()
            yield turn

    def _note(
        self, report: RunReport, call: ModelCall, found: Repeat, history: History, before: Spent
    ) -> None:
        number = before.calls + 1
        back = min(_count_back(found, history), history.count_since_person() - 1)
        own = [origin for origin in list(self._origins)[: back + 1] if origin is not None]
        begins, first = own[-1] if own else _Origin(number, call)
        loop = report.loops[-1] if report.loops else None
        if loop is None or begins > loop.ends:
            loop = FoundLoop(found.rule, (), "", False, begins, first.time, first.place)
            report.loops.append(loop)
            self._before = [before, before]
        action = self._judging.detector.find_action(found)
        if not loop.noted:
            loop.noted, self._before[0] = number, before
        if not loop.landed and action is Action.LAND:
            loop.landed = number
        if not loop.stopped and action in _STOPS:
            loop.stopped, self._before[1] = number, before
        loop.ends, loop.ended = number, call.time
        loop.after_note = report.spent.minus(self._before[0])
        if loop.stopped:
            loop.after_stop = report.spent.minus(self._before[1])
        known, loop.rule, loop.what = loop.rule, found.rule, self._judging.turns.explain(found)[0]
        loop.tools = tuple(dict.fromkeys([*loop.tools, *[tool for tool in found.tools if tool]]))[
            :_MOST_SHOWN
        ]
        loop.strong = loop.strong or found.strength == STRONG
        if not loop.turns or loop.rule != known:
            loop.turns = self._show(found)

    def _show(self, found: Repeat) -> list[ShownTurn]:
        """The repeated turns: the newest one, or those of a cycle, oldest first."""
        count = found.calls // found.count if found.rule == CYCLE and found.count else 1
        shown = []
        for turn in list(islice(self._list_turns(), min(count, _MOST_SHOWN)))[::-1]:
            kept, text, sizes = turn.reduce(), "", (0, 0)
            if isinstance(turn, Turn):
                sizes = turn.did.size, len(turn.result.encode("utf-8", "surrogatepass"))
                text = turn.show(_SHOWN) if self._judging.show else ""
            shown.append(
                ShownTurn(
                    kept.action_hash.hex()[:8], sizes[0], kept.normalized.hex()[:8], sizes[1], text
                )
            )
        return shown


def _list_calls(turn: AnyTurn) -> list[str]:
    try:
        return (
            [cut_name(part.name) for part in turn.parts if part.kind == CALL]
            if isinstance(turn, Turn)
            else []
        )
    except NotCounted:
        return []


def _count_back(found: Repeat, history: History) -> int:
    if found.rule in {REPEAT, RESULT}:
        return history.again[-1] if history.again else found.count - 1
    return (found.count if found.rule == ERROR else found.calls) - 1
