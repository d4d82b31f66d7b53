"""Guards: each applies one detector, or the session limits, of a policy to one request.

A guard's steps: `apply_overrides` looks up operators' orders, `read` takes the body and prepares
the pushes and the hit for the store, `recall` takes the answers to pushes, `judge` takes the answer
to the hit. Pure, like `exchange`, which calls it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from extproc.apis import may_declare, open_conversation
from extproc.apis.conversation import ASSISTANT, TOOL, TOOLS
from extproc.apis.usage import LONGEST_MODEL, find_model
from extproc.budgets.guard import BudgetRules
from extproc.decision import Outcome, Repeat, Subject
from extproc.detectors.base import Memory
from extproc.detectors.chain import ChainPlace
from extproc.engine.orders import (
    ALLOW,
    BLOCK,
    GRANT,
    KILL,
    RELEASE,
    ActiveOverride,
    Caller,
    KnownCaller,
    Overrides,
    find_kill,
    find_kind,
    select,
    sum_agent_grants,
    sum_grants,
    sum_tool_grants,
)
from extproc.engine.plan import Detector, Plan
from extproc.engine.reading import Reading
from extproc.request.document import NO_HISTORY, Document, NotCounted, NotJson
from extproc.request.fingerprint import (
    NO_BODY,
    Body,
    identify,
    join_descriptors,
    sum_up,
)
from extproc.request.http import HttpRequest, cut_text
from extproc.sessions.history import DEFAULT_ANSWER, digest_continuation, read_tool_calls
from extproc.sessions.limits import (
    DETECTOR,
    KILLED,
    NO_CALLS,
    NO_GRANTS,
    UNNAMED,
    WITHIN,
    Narrowing,
    SessionLimiter,
)
from extproc.sessions.names import Rings, hash_session
from extproc.sessions.rates import estimate_tokens
from extproc.sessions.trees import NO_AGENT, digest_agent
from extproc.store.pushes import AnyPush
from extproc.store.rules.back_to_back import BACK_TO_BACK, Begin
from extproc.store.rules.budget import Taken
from extproc.store.rules.chain import MAX_ENTRIES, ChainLink, Trail
from extproc.store.rules.root import RootSearch
from extproc.store.rules.session import (
    CONVERSATION,
    JOINED,
    LIMITS,
    OFFERS_NONE,
    Settlement,
    Standing,
    Step,
    move_step,
)
from extproc.store.rules.take_back import CHAIN, LOG, TALLY
from extproc.store.rules.tree import NO_LIMITS, TreeStep
from extproc.store.rules.windows import UNCOUNTED, Count, Hit

Compiled: TypeAlias = Detector | SessionLimiter | BudgetRules
"""What guards are made from."""

Answer: TypeAlias = Count | Standing | Taken
"""The store's answer to a guard's hit."""

Kept: TypeAlias = Sequence[bytes] | Trail
"""The store's answer to a push."""

_CALL: Final = 16
_CALLS_AT_ONCE: Final = 256
"""Random bytes are read for this many names at once, because the system call is slow."""

NO_LABELS: Final[list[tuple[str, str]]] = []

_LONGEST_CALLER: Final = 512
"""Callers with more characters in their descriptors are not cached."""

_TWICE: Final = 2
_IDENTITY: Final = 8
_NO_NAME: Final = bytes(_CALL - CONVERSATION)
_KILLED: Final = LIMITS.index(KILLED)


class _Calls:
    """Random names for calls.

    A forged access log entry cannot guess the name of another client's call.
    """

    def __init__(self) -> None:
        self._names = b""
        self._at = 0

    def name(self) -> bytes:
        """A new, unique name."""
        at = self._at
        if at >= len(self._names):
            self._names, at = os.urandom(_CALL * _CALLS_AT_ONCE), 0
        self._at = at + _CALL
        return self._names[at : at + _CALL]


CALLS: Final = _Calls()
"""Makes names for calls."""


class Guard:
    """One guard and one request. `read` sets everything below `values`.

    Attributes:
        plan: the policy.
        compiled: the detector or limits.
        values: the request's descriptors, by name.
        caller: the same, joined as in the composite.
        caller_in_head: the same, without descriptors in the body.
        composite: the whole composite.
        fingerprint: its CRC32, 8 hex digits.
        tenant: the caller's name, 16 hex digits; see `CallerNames`.
        body_crc32: of the body as this guard compares it.
        repeat: the loop that the request itself shows; None if requests are counted.
        subject: what the request is about, for messages.
        compared: what was compared instead of the body; None if the body itself was.
        compared_exactly: the body was compared byte by byte, because the similarity does not apply
            to it.
        hit: the question that counts the request; None if nothing is counted.
        session: the name of the request's session; empty if only the request itself is judged.
        memory: what later requests of the conversation need from this one; None for nothing.
        pushes: questions that store `memory`, by the session's name and by the conversation's
            content.
        waits: the verdict depends on the answers to `pushes`.
        needs_body: the guard cannot judge the request without its body.
        overrides: operators' orders about the request that have been found so far.
        labels: values shown with the caller, by name.
        first: the guard with the same rules for the request's first caller; None if this is the
            one.
    """

    def __init__(  # noqa: PLR0913  # all that a request's head tells
        self,
        plan: Plan,
        compiled: Compiled,
        values: list[tuple[str, str]],
        descriptors: str,
        session: Sequence[str],
        subject: Subject,
    ) -> None:
        """`session` is the session that the request's head names."""
        self.plan = plan
        self.compiled = compiled
        self.values = values
        self.caller = self.caller_in_head = descriptors
        self.composite = self.fingerprint = self.tenant = ""
        self.body_crc32 = 0
        self.repeat: Repeat | None = None
        self.subject = subject
        self.compared: bytes | None = None
        self.compared_exactly = False
        self.hit: Hit | Begin | Step | None = None
        self.memory: Memory | None = None
        self.pushes: Sequence[AnyPush] = ()
        self.waits = False
        self.session = ""
        self.needs_body = True
        self.overrides: Sequence[ActiveOverride] = ()
        self.labels = NO_LABELS
        self.first: Guard | None = None
        self._in_head = session
        self._known: Caller | None = None
        self._of_caller: Sequence[ActiveOverride] = ()
        self._standing: Overrides | None = None
        self._now = 0.0

    def follow(self, values: list[tuple[str, str]], descriptors: str, place: int) -> Guard:
        """A guard with the same rules for another caller; `place` is 0 for the second caller.

        What the first guard reads from the body is reused, because clients choose the number of
        callers.
        """
        raise NotImplementedError

    def _follow(self, first: Guard) -> None:
        """Copy what does not depend on the caller."""
        self.first = first
        self.labels = first.labels

    def is_about(self, tenant: str) -> bool:
        """Whether an outcome for this caller may be the guard's."""
        return self.tenant == tenant

    def apply_overrides(self, standing: Overrides, now: float, request: HttpRequest) -> None:  # noqa: ARG002  # for detectors
        """Look up operators' orders about the caller.

        Others are looked up once the body has been read.
        """
        self._standing = standing
        self._now = now
        self._look_up_caller(whole=not self.plan.reads_body)

    def find_alias(self) -> str:
        """The caller's alias; empty if it has none."""
        aliases = self.plan.aliases
        if aliases:
            for known in [self.tenant, *self.list_parts()]:
                if known in aliases:
                    return aliases[known]
        return ""

    def list_parts(self) -> list[str]:
        """The names of the values that identify the caller together; empty if there is only one."""
        return self.plan.callers.list_parts(self.values)

    def list_credentials(self) -> list[str]:
        """The hashes of the secrets that identify the caller."""
        return self.plan.callers.list_secrets(self.values)

    def _know_caller(self, others: Sequence[str], *, whole: bool) -> Caller:
        """All names by which orders may refer to the caller or the `others`.

        `whole`: all of the caller's descriptors are known.
        """
        named, aliases = self.plan.callers.split(self.values), self.plan.aliases
        names = [
            *[each.hash() for each in named],
            *([self.plan.callers.name_caller(self.values, self.caller)] if whole else []),
            *others,
        ]
        if aliases:
            names += [aliases[known] for known in names if known in aliases]
        return Caller(
            list(dict.fromkeys(names)), [*self.values, *[(each.name, each.value) for each in named]]
        )

    def list_other_names(self) -> list[str]:
        """The names of other callers that the request counts for; orders about them may apply."""
        return []

    @property
    def is_allowed(self) -> bool:
        """Whether an operator allows the request."""
        return bool(self.overrides) and find_kind(self.overrides, ALLOW) is not None

    def find_stop(self) -> ActiveOverride | None:
        """The order that refuses the request, if any."""
        return find_kind(self.overrides, BLOCK) if self.overrides else None

    @property
    def is_anonymous(self) -> bool:
        """Whether nothing identifies the caller.

        A session does not, because clients choose its name.
        """
        return not self.caller and self.plan.tells_callers_apart

    def counts_without_body(self) -> bool:
        """Whether it can judge the request without its body."""
        return False

    def read(self, exchange: Reading, missing: list[tuple[str, str]]) -> None:
        """Read the request, and prepare the questions to the store.

        Args:
            exchange: the request with its body.
            missing: collects (policy, limit key) of descriptors that the body lacks.

        Raises:
            NotCounted: something that this guard compares is unavailable.
        """
        raise NotImplementedError

    def let_go(self) -> None:
        """Drop the request, which has ended."""

    def name_request(self) -> None:
        """Compute fingerprint and tenant, if `read` has not."""

    def recall(self, answers: Sequence[Kept]) -> None:
        """Take the answers to the pushes, which may change the verdict.

        Raises:
            NotCounted: the answers are not sufficient to count the request.
        """

    def list_counted(self) -> list[tuple[str, ...]]:
        """Counters that need to know the request's end, as (kind, key).

        Those of `back_to_back` also have the request's name.
        """
        return []

    def judge(self, count: Answer) -> Outcome:
        """The guard's outcome."""
        raise NotImplementedError

    def _look_up_caller(self, *, whole: bool) -> None:
        """Look up orders about the caller alone; `whole`: all of its descriptors are known."""
        standing, plan = self._standing, self.plan
        if standing is None:
            return
        others = self.list_other_names()
        key = plan.id, "\n".join([self.caller, *others]), whole
        known = standing.callers.get(key)
        if known is None or known.aliases is not plan.aliases or known.named_by is not plan.callers:
            caller = self._know_caller(others, whole=whole)
            known = KnownCaller(caller, standing.find_by_head(caller), plan.aliases, plan.callers)
            if len(self.caller) <= _LONGEST_CALLER:
                standing.callers.put(key, known)
        self._known = known.caller
        self._of_caller = select(known.filed, plan.id, self._now) if known.filed else known.filed
        self.overrides = self._of_caller

    def _look_up(self, standing: Overrides) -> None:
        tools = self.repeat.tools if self.repeat is not None else self.subject.tools
        caller = self._known or self._know_caller(self.list_other_names(), whole=True)
        found = standing.find_by_body(
            self.plan.id, self._now, caller, self.session, self.fingerprint, tools
        )
        kin = self._find_kin() if standing.name_sessions else ""
        if kin and kin != self.session:
            more = standing.find_by_body(
                self.plan.id, self._now, caller, kin, self.fingerprint, tools
            )
            found = [
                *found,
                *[order for order in more if order.target.session and self._concerns(order)],
            ]
        self.overrides = [*self._of_caller, *found] if found else self._of_caller

    def _find_kin(self) -> str:
        """Another session whose orders may apply to the request; empty if there is none."""
        return ""

    def _concerns(self, order: ActiveOverride) -> bool:  # noqa: ARG002  # for guards that have kin
        """Whether an order about the other session applies to the request."""
        return True

    def _read_body_descriptors(
        self, exchange: Reading, inspected: int, missing: list[tuple[str, str]]
    ) -> None:
        """Complete the caller from the body; `inspected` is the maximum body length, in bytes."""
        document = exchange.open(inspected, shadow=self.plan.shadow)
        self.values = self.plan.read_body_descriptors(
            document, self.values, missing, exchange.request.hash_key
        )
        self.caller = join_descriptors(self.values)
        self._look_up_caller(whole=True)


def renew(name: str, orders: Sequence[ActiveOverride]) -> str:
    """Add the newest release to a part of a key, so that it differs from earlier keys."""
    release = find_kind(orders, RELEASE)
    return name if release is None else f"{release.epoch}.{name}"


class LoopGuard(Guard):
    """A detector, applied to one request.

    Attributes:
        detector: the detector.
        claim: what the headers claim about the body; None for nothing.
        contradicted: the body contradicts the headers.
        is_bare: the detector `spans`, and the body has neither tools nor a turn of the assistant,
            or is unreadable.
    """

    def __init__(
        self,
        plan: Plan,
        detector: Detector,
        values: list[tuple[str, str]],
        descriptors: str,
        session: Sequence[str] = (),
    ) -> None:
        super().__init__(plan, detector, values, descriptors, session, detector.similarity)
        self.detector = detector
        self._name = ("", "")
        self._root = ""
        self._count = UNCOUNTED
        self.claim: Any = None
        self.contradicted = False
        self.is_bare = False
        self.needs_body = detector.needs_body or plan.reads_body

    def follow(self, values: list[tuple[str, str]], descriptors: str, place: int) -> Guard:  # noqa: ARG002  # for budgets
        """See `Guard`."""
        other = LoopGuard(self.plan, self.detector, values, descriptors, self._in_head)
        other._follow(self)
        return other

    def apply_overrides(self, standing: Overrides, now: float, request: HttpRequest) -> None:
        """See `Guard`. Orders about a session apply to the agents that it started, too."""
        names = self.plan.root_names
        if standing.name_sessions:
            self._root = names.find(names.read(request), None)
        super().apply_overrides(standing, now, request)

    def _find_kin(self) -> str:
        return self._root

    def find_stop(self) -> ActiveOverride | None:
        """See `Guard`. Without session limits, it also enforces kills of sessions."""
        stop = super().find_stop()
        if stop is not None or not self.overrides or self.plan.limiter is not None:
            return stop
        return find_kill(
            [order for order in self.overrides if order.target.session or order.kind == RELEASE]
        )

    def read(self, exchange: Reading, missing: list[tuple[str, str]]) -> None:
        """See `Guard`."""
        detector, sums = self.detector, exchange.sums
        if self.plan.reads_body:
            self._read_body_descriptors(exchange, detector.max_inspect_bytes, missing)
        if not self.caller and self.plan.guards_strangers and not detector.needs_no_caller:
            raise NotCounted("missing_descriptor")
        if not detector.needs_body:
            sums = NO_BODY
        elif detector.looks:
            document = exchange.open(
                detector.max_inspect_bytes,
                ends=detector.similarity.reads_ends,
                shadow=detector.shadow,
            )
            sums = (
                self._compare(exchange, document)
                if not document.shortened
                else self._compare_excerpt(exchange, document)
            )
        self.body_crc32 = sums.crc32
        self.composite, self.fingerprint, check = exchange.name(sums, self.caller)
        self.tenant = self.plan.callers.name_caller(self.values, self.caller)
        self._name = exchange.scope, self.fingerprint + check
        if detector.spans:
            self.is_bare = self._is_bare(exchange)
        self._ask()
        if self.memory is not None and self.plan.rings is not None:
            self.waits = self.memory.waits
            self.pushes = self._list_pushes(self.plan.rings, self.memory, exchange.scope)

    def _list_pushes(self, rings: Rings, memory: Memory, scope: str) -> list[AnyPush]:
        """A ring is found by the session's name; without a turn, only by its history."""
        detector, session = self.detector.name, renew(self.session, self.overrides)
        pushes: list[AnyPush] = []
        if memory.place is not None:
            pushes.append(
                rings.chains.make_link(
                    detector, scope, self.tenant, session, memory.place, memory.entry
                )
            )
        if memory.entry and self.session:
            pushes.append(rings.make_push(detector, scope, self.tenant, session, memory))
        return pushes

    def recall(self, answers: Sequence[Kept]) -> None:
        """See `Guard`.

        If the chain knows the whole conversation, only the chain counts: names may be shared. But
        it knows nothing from before a summary.
        """
        memory = self.memory
        if memory is None or not memory.waits:
            return
        first = answers[0]
        whole = isinstance(first, Trail) and first.whole and not memory.resumes
        for answer in answers[:1] if whole else reversed(answers):
            follows = isinstance(answer, Trail)
            self.repeat = memory.recall(
                answer.entries if isinstance(answer, Trail) else answer, followed=follows
            )
            if self.repeat is not None and self.repeat.looping:
                break
        self._ask()

    def judge(self, count: Answer) -> Outcome:
        """See `Guard`."""
        if not isinstance(count, Count):
            raise TypeError("a hit is answered with a count")
        self._count = count
        outcome = self.detector.judge(
            self.fingerprint, self.tenant, count, self.subject, self.repeat
        )
        return self.detector.spare_bare(outcome, count) if self.is_bare else outcome

    def list_counted(self) -> list[tuple[str, ...]]:
        """See `Guard`.

        The first request of a window stays counted, unless the threshold is two, to save the
        report.
        """
        detector, hit = self.detector, self.hit
        if detector.counts_failed:
            return []
        if isinstance(hit, Begin):
            return [(BACK_TO_BACK, hit.key, hit.name.hex())]
        counted: list[tuple[str, ...]] = [
            (CHAIN, push.key) for push in self.pushes if self.waits and isinstance(push, ChainLink)
        ]
        if (
            isinstance(hit, Hit)
            and not detector.stateless
            and (self._count.count > 1 or detector.threshold <= _TWICE)
        ):
            counted.append((LOG if hit.window_type == "sliding_log" else TALLY, hit.key))
        return counted

    def _is_bare(self, exchange: Reading) -> bool:
        if self.subject.tools:
            return False
        try:
            document = exchange.open(
                self.detector.max_inspect_bytes, ends=True, shadow=self.detector.shadow
            )
            conversation = open_conversation(document)
            speakers = [speaker for speaker in conversation.list_speakers() if speaker]
        except NotCounted:
            return True
        if speakers and speakers[-1] == ASSISTANT:  # the start of the answer
            speakers.pop()
        before = conversation.before
        spoken = before.after or before.open_ended or ASSISTANT in speakers or TOOL in speakers
        return not spoken and conversation.find_offer() != TOOLS

    def _compare(self, exchange: Reading, document: Document) -> Body:
        """Read the body; returns the checksums of what is compared."""
        similarity, rings, first = self.detector.similarity, self.plan.rings, self.first
        if isinstance(first, LoopGuard):
            self.session, self.subject = first.session, first.subject
            self.compared, self.repeat, self.memory = first.compared, first.repeat, first.memory
            self.compared_exactly = first.compared_exactly
            return NO_BODY.plus(self.compared) if self.compared is not None else exchange.sums
        if self.claim is not None:
            self.contradicted = similarity.contradicts(self.claim, document)
        if similarity.remembers and rings is not None and not self.is_anonymous:
            self.session = exchange.find_session(
                rings, self._in_head, document, self.plan, self.caller
            )
            named = self.session != ""
            self.compared, self.repeat, self.memory = similarity.compare_in_session(
                document, named=named
            )
        else:
            self.compared, self.repeat = similarity.compare(document)
        self.subject = similarity.find_subject(document)
        if self.compared is not None:
            return NO_BODY.plus(self.compared)
        self.compared_exactly = exchange.sums.length > 0
        return exchange.sums

    def _compare_excerpt(self, exchange: Reading, document: Document) -> Body:
        """As `_compare`, for an excerpt of a body that is too long."""
        try:
            return self._compare(exchange, document)
        except NotCounted:
            raise NotCounted("inspect_limit") from None

    def _ask(self) -> None:
        """Prepare the hit. Everything that its key depends on is known now."""
        if self._standing is not None:
            self._look_up(self._standing)
        scope, name = self._name
        name = renew(name, self.overrides)
        if self.detector.spans:
            self.hit = self.detector.make_begin(
                scope, self.tenant, name, self.subject, CALLS.name(), bare=self.is_bare
            )
            return
        self.hit = self.detector.make_hit(scope, self.tenant, name, self.subject, self.repeat)


class SessionGuard(Guard):
    """A policy's session limits, applied to one request.

    Attributes:
        limiter: the limits.
        calls: the calls in the request's history.
        call: the name of the request, 16 bytes, for its settlement.
        model: the model in the request; empty if missing.
        reserve: estimated cost, in nano-dollars.
        standing: the session's state after the request was counted; None before.
        narrowing: tools to remove from the request; None for nothing.
        unreadable: why the body could not be searched for calls; empty if it could.
        agent: the agent that sends the request, according to the head.
        agent_name: hash of the agent's name, 16 hex digits; empty for the session itself.
        parent_name: the same for the agent that started it.
        is_second: it counts the start of a conversation among requests without a session, in
            addition to the guard that counts it as a session.
    """

    def __init__(
        self,
        plan: Plan,
        limiter: SessionLimiter,
        values: list[tuple[str, str]],
        descriptors: str,
        session: Sequence[str],
    ) -> None:
        super().__init__(plan, limiter, values, descriptors, session, WITHIN)
        self.limiter = limiter
        self.calls = NO_CALLS
        self.call = b""
        self.model = ""
        self.reserve = 0
        self.standing: Standing | None = None
        self.narrowing: Narrowing | None = None
        self.unreadable = ""
        self.agent = NO_AGENT
        self.agent_name = self.parent_name = ""
        self._grants = NO_GRANTS
        self._limits = limiter.limits
        self._agent_limits = NO_LIMITS
        self._exchange: Reading | None = None
        self._earlier_steps = 0
        self._place: ChainPlace | None = None
        self._search: RootSearch | None = None
        self._stopped = False
        self._nameless = False
        self._known_before = False
        self._unknown = False
        self.is_second = False

    def follow(self, values: list[tuple[str, str]], descriptors: str, place: int) -> Guard:  # noqa: ARG002  # for budgets
        """See `Guard`."""
        other = SessionGuard(self.plan, self.limiter, values, descriptors, self._in_head)
        other._follow(self)
        other.agent = self.agent
        return other

    def find_stop(self) -> ActiveOverride | None:
        """See `Guard`. It also enforces kills of sessions."""
        stop = super().find_stop()
        return (
            find_kill(self.overrides) if stop is None and self.session and self.overrides else stop
        )

    def counts_without_body(self) -> bool:
        """See `Guard`. Every request is a step, whatever its body."""
        self._unknown = not self.plan.reads_body
        return self._unknown

    def read(self, exchange: Reading, missing: list[tuple[str, str]]) -> None:
        """See `Guard`."""
        if self.plan.reads_body:
            self._read_body_descriptors(exchange, self.limiter.max_inspect_bytes, missing)
        if not self.caller and self.plan.guards_strangers:
            raise NotCounted("missing_descriptor")
        self.body_crc32 = exchange.sums.crc32
        self.tenant = self.plan.callers.name_caller(self.values, self.caller)
        self._exchange = exchange
        if self._standing is not None:
            self.name_request()
        document = self._open(exchange)
        name = "" if self.is_anonymous else self._find_name(exchange, document)
        place = None
        if not name and not self.is_anonymous and not self.waits and document is not None:
            place = exchange.find_place(document)
        if place is None and not self.waits:
            self._name_session(name)
        if document is not None:
            self._read_calls(document)
        self.call = CALLS.name()
        self.model = cut_text(find_model(exchange.request.path, self.calls.model), LONGEST_MODEL)
        size, budget, answer = (
            exchange.sums.length,
            self.plan.budget,
            self.calls.answer or DEFAULT_ANSWER,
        )
        # If budgets need the more exact, slower estimate, sessions use it, too.
        shared = budget is not None and budget.guard.needs_body
        tokens = exchange.estimate_prompt(document, size) if shared else estimate_tokens(size)
        self.reserve = self.limiter.rates.weigh(self.model, tokens, answer)
        if place is not None:
            fresh = self.call[:CONVERSATION]
            self._earlier_steps, self._nameless = place.depth, True
            self.waits = place.depth > 0
            entry = (
                digest_continuation(document, place, self.calls.offer)
                if self.waits and document is not None
                else b""
            )
            self.pushes = [
                self.limiter.chains.make_link(
                    DETECTOR, exchange.scope, self.tenant, "", place, entry, fresh
                )
            ]
            if self.waits:
                self._place = place
            else:  # a new conversation has no earlier name
                self._name_session(fresh.hex())
        if not self.waits:
            self._ask(exchange)

    def recall(self, answers: Sequence[Kept]) -> None:
        """See `Guard`.

        The session is the agent's root, or the conversation that the request continues.
        """
        if self.agent.hangs and self._exchange is not None:
            self._learn_root(answers[0])
            self._ask(self._exchange)
        for answer in answers:
            if isinstance(answer, Trail) and self._exchange is not None:
                self._known_before = answer.name != self.call[:CONVERSATION]
                self._name_session(answer.name.hex())
                if not answer.whole or len(answer.entries) != min(self._earlier_steps, MAX_ENTRIES):
                    self._place = None
                self._ask(self._exchange)
        # The name is known only now, and with it the orders about the session.
        if self.waits and not self.limiter.shadow and self.find_stop() is not None:
            self.hit, self._stopped = None, True

    def count_start(self) -> SessionGuard | None:
        """A second guard, which counts starts of conversations without a session, if limited.

        The conversation may never continue, as in a loop of one prompt. If it does, `join_session`
        removes it there.
        """
        if (
            not self._nameless
            or self.waits
            or self.limiter.unnamed is None
            or self._exchange is None
        ):
            return None
        second = SessionGuard(self.plan, self.limiter, self.values, self.caller, self._in_head)
        second.is_second, second.caller_in_head = True, self.caller_in_head
        second.labels, second.tenant, second.body_crc32 = self.labels, self.tenant, self.body_crc32
        second.call, second.calls, second.model, second.reserve = (
            self.call,
            self.calls,
            self.model,
            self.reserve,
        )
        second.overrides, second._known, second._of_caller = (
            self._of_caller,
            self._known,
            self._of_caller,
        )
        second._standing, second._now, second._exchange = self._standing, self._now, self._exchange
        second._name_session("")
        second._ask(self._exchange)
        return second

    def join_session(self) -> Settlement | None:
        """Uncount a conversation's start without a session; None unless it has one request."""
        standing, limits, exchange = self.standing, self.limiter.unnamed, self._exchange
        if standing is None or limits is None or exchange is None or not self._known_before:
            return None
        if standing.limit or standing.retry or standing.steps != _TWICE:
            return None
        key = self.limiter.find_ledger(exchange.scope, self.tenant, renew(UNNAMED, self.overrides))
        return Settlement(
            key,
            limits,
            bytes.fromhex(self.session) + _NO_NAME,
            standing.cost,
            estimated=False,
            outcome=JOINED,
        )

    def _find_kin(self) -> str:
        """See `Guard`. An agent can be stopped without its session."""
        return self.agent_name

    def _concerns(self, order: ActiveOverride) -> bool:
        return order.kind in {ALLOW, BLOCK, KILL}

    def _name_session(self, name: str) -> None:
        """Set the session's name; empty if there is none.

        Raises:
            NotCounted: there is none, and requests without a session have no limits.
        """
        self.session = name or UNNAMED
        if self._standing is not None:
            self._look_up(self._standing)
        if not name and (self.limiter.unnamed is None or self.is_anonymous):
            raise NotCounted(UNNAMED)

    def _find_name(self, exchange: Reading, document: Document | None) -> str:
        """The name of the request's session; empty if none, or if only the store knows it."""
        name = exchange.find_session(
            self.limiter.names, self._in_head, document, self.plan, self.caller
        )
        return name if not name or self.agent is NO_AGENT else self._find_root(name, exchange.scope)

    def _find_root(self, name: str, scope: str) -> str:
        """The session at the root of an agent's tree, given the session that its request names.

        If only the store knows the root, there are two ways. Usually, the named session stands for
        the root, and the store finds the root when it counts the step. If there are orders about
        sessions, the result is empty and the store is asked first, because an order about the root
        changes the step.
        """
        agent, roots, tenant = self.agent, self.limiter.roots, self.tenant
        self.agent_name = hash_session(agent.key, agent.name)
        if not agent.hangs:
            self.parent_name = hash_session(agent.key, agent.parent) if agent.parent else ""
            return name
        root = roots.find(tenant, self.agent_name)
        if not root:
            search = roots.make_search(scope, tenant, self.agent_name, name)
            if self._standing is not None and self._standing.name_sessions:
                self.pushes, self.waits = [search], True
            else:
                self._search, root = search, name
        self._place_below(root, name)
        return root

    def _learn_root(self, answer: Kept) -> None:
        """Take the store's answer about the agent's root."""
        if isinstance(answer, Trail) or not answer:
            raise TypeError("a search for a root is answered with it")
        root = answer[0].hex()
        self.limiter.roots.keep(self.tenant, self.agent_name, root)
        self._place_below(root, self.parent_name)
        self._name_session(root)

    def _take_root(self, found: bytes) -> None:
        """Take the agent's root, in whose session the store has counted the request."""
        root, step = found.hex(), self.hit
        self.limiter.roots.keep(self.tenant, hash_session(self.agent.key, self.agent.name), root)
        if isinstance(step, Step) and root != self.session:
            self._place_below(root, self.session)
            self.hit, self.session = move_step(step, found), root

    def _place_below(self, root: str, parent: str) -> None:
        """Set the agent's parent; empty directly below the root.

        If the agent is its own root, it is no agent.
        """
        self.parent_name = "" if parent == root else parent
        if self.agent_name == root:
            self.agent_name = self.parent_name = ""

    def _ask(self, exchange: Reading) -> None:
        """Prepare the step for the store."""
        session, unnamed = renew(self.session, self.overrides), self.session == UNNAMED
        self._grants = sum_grants(self.overrides) if self.overrides else NO_GRANTS
        granted = sum_tool_grants(self.overrides) if self.overrides and not unnamed else None
        self._limits = (
            self.limiter.extend_tools(granted)
            if granted
            else self.limiter.find_limits(self.session)
        )
        self.hit = self.limiter.make_step(
            exchange.scope,
            self.tenant,
            session,
            self._identify(exchange, session),
            self.call,
            self.reserve,
            self.calls,
            self._grants,
            self._limits,
            allowed=self.is_allowed,
            earlier=0 if unnamed else self._earlier_steps,
            tree=None if unnamed else self._place_in_tree(exchange.scope, session),
            search=self._search,
        )

    def _place_in_tree(self, scope: str, session: str) -> TreeStep | None:
        """The request's place among the agents of its session; None if agents have no limits."""
        limits = self.limiter.agent_limits
        if limits is None:
            return None
        if self.overrides:
            limits = (
                NO_LIMITS
                if self.is_allowed
                else self.limiter.extend_agents(sum_agent_grants(self.overrides))
            )
        self._agent_limits = limits
        agent, parent = digest_agent(self.agent_name), digest_agent(self.parent_name)
        return TreeStep(self.limiter.find_tree(scope, self.tenant, session), limits, agent, parent)

    def _identify(self, exchange: Reading, session: str) -> bytes:
        """A digest that a retry shares.

        If the history is complete, its ids and results are ignored.
        """
        if self._unknown:
            return self.call[:_IDENTITY]
        place = self._place
        if place is not None:
            return place.identify(self.calls.offer)
        # Two agents with the same task are not retries
        own = sum_up(self.agent_name) if self.agent_name else 0
        return identify(
            exchange.head, exchange.sums, own if self.agent.hangs and own else sum_up(session) ^ own
        )

    def let_go(self) -> None:
        """See `Guard`."""
        self._exchange = None

    def name_request(self) -> None:
        """See `Guard`. Computed lazily: expensive and rarely needed."""
        exchange = self._exchange
        if exchange is not None:
            self.composite, self.fingerprint, _ = exchange.name(exchange.sums, self.caller)

    def judge(self, count: Answer) -> Outcome:
        """See `Guard`."""
        if self._stopped:
            return self._know(self.kill())
        if not isinstance(count, Standing):
            raise TypeError("a step is answered with a standing")
        self.standing = count
        if count.root:
            self._take_root(count.root)
        if count.limit or self.limiter.gives_notice:
            self.name_request()
        if not count.limit and self.session != UNNAMED and not self.is_allowed:
            self.narrowing = self._find_narrowing(count)
        outcome = self.limiter.judge(
            self.fingerprint,
            self.tenant,
            count,
            self.calls,
            self._grants,
            self.session,
            self._agent_limits,
            own=not self.agent_name,
        )
        return self._know(outcome)

    def _find_narrowing(self, standing: Standing) -> Narrowing | None:
        """See `SessionLimiter.find_narrowing`.

        None as well if the only effect would be on tools that are not offered.
        """
        found = self.limiter.find_narrowing(standing, self._limits, self._grants, self.calls)
        document = (
            self._exchange.look(shadow=self.limiter.shadow) if self._exchange is not None else None
        )
        if found is None or found.removes or document is None:
            return found
        declares = self.calls.offer != OFFERS_NONE and may_declare(document, found.scarce)
        return found if declares else None

    def _know(self, outcome: Outcome) -> Outcome:
        self.subject = outcome.subject
        return outcome

    def kill(self) -> Outcome:
        """The outcome for a session that an operator has killed."""
        self.name_request()
        self.standing = Standing(_KILLED)
        return self.limiter.kill(self.fingerprint, self.tenant)

    @property
    def is_let_through(self) -> bool:
        """Whether the store has counted the request, and no limit stops it."""
        return self.standing is not None and not self.standing.limit

    def refuse_unnarrowed(self) -> Outcome:
        """The outcome if tools cannot be removed from the request."""
        self.name_request()
        standing, narrowing = self.standing or Standing(), self.narrowing or Narrowing(every=True)
        self.narrowing = None
        told = self.fingerprint, self.tenant, standing, narrowing
        return self.limiter.refuse_unnarrowed(*told, self._limits, self._grants, self.session)

    def list_newest_tools(self) -> tuple[str, ...]:
        """The tools called in the newest step."""
        return self.limiter.list_newest_tools(self.calls)

    def list_grants(self) -> list[ActiveOverride]:
        """The grants of its session."""
        return [
            override
            for override in self.overrides
            if override.kind == GRANT and not override.budget
        ]

    @property
    def has_grown(self) -> bool:
        """Whether its session's input has reached `max_input_growth`."""
        return self.standing is not None and self.limiter.find_growth(self.standing) > 0

    def name_ledger(self) -> str:
        """The key of the ledger that counted the request."""
        return self.hit.key if isinstance(self.hit, Step) else ""

    @property
    def nameless(self) -> Document | None:
        """The document of a request whose session is known only by its content; else None."""
        exchange = self._exchange
        return (
            exchange.look(shadow=self.limiter.shadow)
            if self._nameless and exchange is not None
            else None
        )

    def _open(self, exchange: Reading) -> Document | None:
        """The document; None if it is unreadable."""
        try:
            return exchange.open(self.limiter.max_inspect_bytes, shadow=self.limiter.shadow)
        except NotCounted as why:
            self.unreadable = why.reason
            return None

    def _read_calls(self, document: Document) -> None:
        first = self.first
        if isinstance(first, SessionGuard):
            self.calls, self.unreadable = first.calls, first.unreadable
            return
        try:
            self.calls = read_tool_calls(document)
        except NotCounted as why:
            hides = (
                document.may_be_json() if isinstance(why, NotJson) else why.reason not in NO_HISTORY
            )
            self.unreadable = why.reason if hides else ""
