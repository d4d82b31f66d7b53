"""What a policy's guards make of one request, each for itself: from its headers to a verdict.

A candidate is a guard that may stop the request. It is sealed once the body is known, the store counts what it asks for, and
then it judges. Pure, as all that stands above it in `evaluation`.
"""

from __future__ import annotations

from collections.abc import Sequence

from extproc.decision import Outcome, Repeat, Subject
from extproc.fingerprint import NO_BODY, Body, compose, digest, hash_tenant, join_descriptors
from extproc.guards.loop import Detector
from extproc.guards.override import ALLOW, RELEASE, Override, Overrides, find_kind
from extproc.plan import Plan
from extproc.similarity.base import Memory
from extproc.similarity.document import Document, NotCounted
from extproc.windows import Count, Hit, Push


class Sealing:
    """What all candidates of a request are sealed with.

    Attributes:
        head: from `fingerprint.write_head`.
        body: of the request.
        document: the same to look into, None where it cannot be.
        unreadable: why not.
        scope: attachment name.
    """

    __slots__ = ("_body", "_caller", "_names", "body", "document", "head", "scope", "unreadable")

    def __init__(self, head: str, body: Body, document: Document | None, unreadable: str, scope: str) -> None:
        """Keep them as given."""
        self._body: Body | None = None
        self._caller = ""
        self._names = ("", "", "", "")
        self.head = head
        self.body = body
        self.document = document
        self.unreadable = unreadable
        self.scope = scope

    def name(self, body: Body, caller: str) -> tuple[str, str, str, str]:
        """Composite, fingerprint, check and tenant of a candidate; a canary's are mostly those of the candidate before it."""
        if body is not self._body or caller != self._caller:
            composite = compose(self.head, body, caller)
            fingerprint, check = digest(composite, body)
            self._body, self._caller = body, caller
            self._names = composite, fingerprint, check, hash_tenant(caller)
        return self._names


class Candidate:
    """One detector's part in a request; everything below `values` is set by `seal`.

    Attributes:
        plan: the policy.
        detector: of it.
        values: the descriptors that the request has, by name.
        caller: the same as the composite has them.
        composite: the whole composite.
        fingerprint: its CRC32, 8 hex digits.
        tenant: hash of the descriptors, 16 hex digits.
        body_crc32: of the body as this detector compares it.
        repeat: what the request itself says about a loop, None where requests are counted.
        subject: what the request is about.
        compared: what was compared in place of the body, None where the body was.
        compared_exactly: the body was compared because it is not what the similarity is for.
        hit: what the store is asked to count, None for nothing.
        session: the name of the request's session, empty where the request alone is compared.
        memory: what the request's session keeps of it, None for nothing.
        push: the same as the store is asked to keep it.
        needs_body: without the body this detector cannot count the request.
        overrides: what operators have ordered about the request, as far as it is known.
    """

    __slots__ = (
        "_in_head",
        "_name",
        "_now",
        "_standing",
        "body_crc32",
        "caller",
        "compared",
        "compared_exactly",
        "composite",
        "detector",
        "fingerprint",
        "hit",
        "memory",
        "needs_body",
        "overrides",
        "plan",
        "push",
        "repeat",
        "session",
        "subject",
        "tenant",
        "values",
    )

    def __init__(
        self, plan: Plan, detector: Detector, values: list[tuple[str, str]], descriptors: str, session: Sequence[str] = ()
    ) -> None:
        """Not sealed yet; `session` is what the request's head says about it."""
        self.plan = plan
        self.detector = detector
        self.values = values
        self.caller = descriptors
        self.composite = self.fingerprint = self.tenant = ""
        self.body_crc32 = 0
        self.repeat: Repeat | None = None
        self.subject: Subject = detector.similarity
        self.compared: bytes | None = None
        self.compared_exactly = False
        self.hit: Hit | None = None
        self.memory: Memory | None = None
        self.push: Push | None = None
        self.session = ""
        self._in_head = session
        self._name = ("", "")
        self.needs_body = detector.needs_body or plan.reads_body
        self.overrides: Sequence[Override] = ()
        self._standing: Overrides | None = None
        self._now = 0.0

    def obey(self, standing: Overrides, now: float) -> None:
        """Look up what operators have ordered: at once if that may be a block, and again when all is known of the request."""
        self._standing = standing
        self._now = now
        if standing.blocks_heads:
            self._look_up("" if self.plan.reads_body else hash_tenant(self.caller))

    def is_allowed_uncounted(self) -> bool:
        """The same of a request of which no more will be known."""
        if not self.overrides:
            self._look_up("" if self.plan.reads_body else hash_tenant(self.caller))
        return self.is_allowed

    @property
    def is_allowed(self) -> bool:
        """An operator has ordered that nothing is done about the request."""
        return bool(self.overrides) and find_kind(self.overrides, ALLOW) is not None

    def _look_up(self, tenant: str) -> None:
        if self._standing is not None:
            tools = self.repeat.tools if self.repeat is not None else self.subject.tools
            self.overrides = self._standing.find(
                self.plan.id, self._now, self.values, tenant, self.session, self.fingerprint, tools
            )

    def _renew(self, name: str) -> str:
        """A part of a key, another one since a release: what was counted before it is not found again."""
        release = find_kind(self.overrides, RELEASE) if self.overrides else None
        return name if release is None else f"{release.epoch}.{name}"

    def seal(self, sealing: Sealing, missing: list[tuple[str, str]]) -> None:
        """Work out the names.

        Args:
            sealing: the request.
            missing: takes (policy, limit key) of what the body does not have.

        Raises:
            NotCounted: what this detector compares cannot be had.
        """
        body = sealing.body
        detector = self.detector
        if self.plan.reads_body:
            self.values = self.plan.read_body_descriptors(self._inspect(sealing), self.values, missing)
            self.caller = join_descriptors(self.values)
        if not detector.needs_body:
            body = NO_BODY
        elif detector.looks:
            document = self._inspect(sealing)
            self._compare(document)
            self.subject = detector.similarity.find_subject(document)
            if self.compared is not None:
                body = NO_BODY.plus(self.compared)
            elif body.length:
                self.compared_exactly = True
        self.body_crc32 = body.crc32
        self.composite, self.fingerprint, check, self.tenant = sealing.name(body, self.caller)
        self._name = sealing.scope, self.fingerprint + check
        self._look_up(self.tenant)
        self.hit = self._make_hit()
        if self.memory is not None and self.plan.sessions is not None:
            session = self._renew(self.session)
            self.push = self.plan.sessions.make_push(detector.name, sealing.scope, self.tenant, session, self.memory)

    def recall(self, entries: Sequence[bytes]) -> None:
        """Take what the session's ring has to say, which may be another verdict."""
        if self.memory is not None and self.memory.waits:
            self.repeat = self.memory.recall(entries)
            self._look_up(self.tenant)
            self.hit = self._make_hit()

    def judge(self, count: Count) -> Outcome:
        """What this detector makes of the request."""
        return self.detector.judge(self.fingerprint, self.tenant, count, self.subject, self.repeat)

    def _compare(self, document: Document) -> None:
        similarity, sessions = self.detector.similarity, self.plan.sessions
        anonymous = not self.caller and self.plan.tells_callers_apart  # a session, whose name is anybody's choice, is no caller
        if similarity.remembers and sessions is not None and not anonymous:
            self.session = sessions.find(self._in_head, document)
        if self.session:
            self.compared, self.repeat, self.memory = similarity.compare_in_session(document)
        else:
            self.compared, self.repeat = similarity.compare(document)

    def _make_hit(self) -> Hit | None:
        scope, digest = self._name
        return self.detector.make_hit(scope, self.tenant, self._renew(digest), self.subject, self.repeat)

    def _inspect(self, sealing: Sealing) -> Document:
        """The document, where it is small enough for this detector.

        Raises:
            NotCounted: it is not, or nobody can look into it.
        """
        document = sealing.document
        if document is None:
            raise NotCounted(sealing.unreadable)
        if len(document) > self.detector.max_inspect_bytes:
            raise NotCounted("inspect_limit")
        return document
