"""The interface of all similarities, so that no other module needs to know one by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from extproc.decision import Advice, Framed, Outcome, Repeat, Subject, ToolFailure
from extproc.detectors.chain import ChainPlace
from extproc.detectors.keys import LoopKeys, SimilarityKeys
from extproc.objects import JsonObject, Place
from extproc.request.document import Document
from extproc.request.quoting import quote

_SHOWN = 200
"""Maximum length of a path in a message, in characters."""

_UNITS = (("days", 86_400), ("hours", 3_600), ("minutes", 60))


class Memory(Protocol):
    """What a request stores for later ones of its conversation, and how it uses what they stored.

    Attributes:
        entry: its entry in the conversation's ring; empty at the start of a conversation, which has
            no turn yet.
        identity: digest of 8 bytes that a retry shares; empty if the session has no name.
        place: its place in its conversation's chain; None if unknown.
        waits: its verdict depends on the ring's entries.
        resumes: its history begins with a summary, so the session has older turns.
    """

    entry: bytes
    identity: bytes
    place: ChainPlace | None
    waits: bool
    resumes: bool

    def recall(self, entries: Sequence[bytes], *, followed: bool = False) -> Repeat | None:
        """The loop, given the ring's entries, oldest first and including this request's own.

        `followed`: all entries are from the same conversation, even if the request omits some.
        """
        ...


class Similarity:
    """How a detector compares requests. This class is `exact`; the others are subclasses.

    Attributes:
        keys: its keys in loop_detection entries, including those of `LoopKeys`.
        looks: `compare` reads the body; otherwise, the body's checksums are compared.
        reads_ends: if a body is too long to inspect, an excerpt is sufficient; see `Excerpt`.
        reads_headers: headers may tell the body's content.
        stateless: a request shows by itself whether it is part of a loop. Nothing is counted; the
            store only has cooldowns.
        remembers: earlier requests of a session may supply turns that a request does not show.
        default_threshold: for entries without one; None if it is required.
    """

    keys: ClassVar[type[JsonObject]] = LoopKeys
    looks: ClassVar[bool] = False
    reads_ends: ClassVar[bool] = False
    reads_headers: ClassVar[bool] = False
    stateless: ClassVar[bool] = False
    remembers: ClassVar[bool] = False
    default_threshold: ClassVar[int | None] = None

    def __init__(self, keys: SimilarityKeys) -> None:
        """Compile the keys of an enabled entry."""

    # Subclasses read them
    def read_headers(self, headers: Mapping[str, bytes]) -> Any:  # noqa: ANN401, ARG002
        """What a request's headers claim about its body, for `contradicts`; None for nothing.

        Raises:
            NotCounted: the headers alone show that the request is not counted.
        """
        return None

    # Subclasses read them
    def contradicts(self, claim: Any, document: Document) -> bool:  # noqa: ANN401, ARG002
        """Whether a body contradicts the headers."""
        return False

    # Subclasses read it
    def compare(self, document: Document) -> tuple[bytes | None, Repeat | None]:  # noqa: ARG002
        """Read a body.

        Returns:
            what is compared, in canonical form: `b""` excludes the body, None compares the body
                itself;
            the loop that the request itself shows; None if requests are counted.

        Raises:
            NotCounted: there is nothing to compare.
        """
        return None, None

    def compare_in_session(
        self,
        document: Document,
        *,
        named: bool = True,  # noqa: ARG002  # only some subclasses need it
    ) -> tuple[bytes | None, Repeat | None, Memory | None]:
        """Like `compare`, for a known caller; also returns what to store, None for nothing.

        Args:
            document: the body.
            named: the request names its session.

        Raises:
            NotCounted: as `compare`.
        """
        return *self.compare(document), None

    def find_subject(self, document: Document) -> Subject:  # noqa: ARG002  # subclasses read it
        """The subject that writes the messages; the similarity itself if they ignore the body.

        Raises:
            NotCounted: as `compare`.
        """
        return self

    @property
    def threshold(self) -> int | None:
        """See `Subject`."""
        return None

    @property
    def tools(self) -> tuple[str, ...]:
        """See `Subject`."""
        return ()

    # Subclasses have formats
    def frame(self, message: str, accept: str) -> Framed | None:  # noqa: ARG002
        """See `Subject`."""
        return None

    # Subclasses read it
    def foresee(self, document: Document, repeat: Repeat, more: int) -> tuple[int, int]:  # noqa: ARG002
        """When a loop is refused if it continues: its length then, and the turns until then.

        `more` is the difference between the threshold of the refusal and the one that was reached.
        The turns are 0 or fewer if it never is.
        """
        rounds = repeat.calls // repeat.count if len(repeat.tools) > 1 and repeat.count else 1
        at = repeat.threshold + more
        return at * rounds, (at - repeat.count) * rounds

    # Subclasses read it
    def find_result(self, document: Document) -> str:  # noqa: ARG002
        """The newest result, for people; empty if the similarity reads none."""
        return ""

    # Subclasses read it
    def find_failure(self, document: Document) -> ToolFailure | None:  # noqa: ARG002
        """The failure that a loop repeats, to recognize it in other sessions; None without one."""
        return None

    def show(self, document: Document) -> list[str]:  # noqa: ARG002  # subclasses read it
        """What is compared, as lines for people.

        Raises:
            NotCounted: as `compare`.
        """
        return []

    def describe(self, repeat: Repeat | None) -> str:  # noqa: ARG002  # subclasses describe it
        """A short description of the loop that the request itself shows."""
        return ""

    def write_message(self, outcome: Outcome, method: str, path: str) -> str:
        """What repeated, how often, over what time, and what to do instead; a model reads it."""
        return (
            f"Loop detected: {self.advise(outcome, method, path).what} and was refused. "
            "If sent again, it will be refused again. "
            "Do not retry it unchanged: change the approach or the input, or stop and report the "
            "result you have so far."
        )

    def advise(self, outcome: Outcome, method: str, path: str) -> Advice:
        """See `Subject`."""
        repeated = self.name_repeated(f"({quote(method)} {quote(path, _SHOWN)})")
        often, when = count_repeats(outcome)
        what = f"{repeated} has been sent {often} {when}"
        return Advice(
            what,
            "",
            "Change the approach or the input, or stop and report the result you have so far.",
        )

    def name_repeated(self, place: str) -> str:
        """The subject of a sentence: what was repeated; `place` is method and path in brackets."""
        return f"this identical request {place}"

    @staticmethod
    def find_errors(
        loop: dict[str, Any],  # noqa: ARG004  # subclasses have rules
        place: Place,  # noqa: ARG004
    ) -> Iterator[tuple[Place, str]]:
        """Invalid combinations of keys in a raw entry: the place of each, and what is expected."""
        yield from ()


class HistorySimilarity(Similarity):
    """A similarity that finds loops in a request's history."""

    looks: ClassVar[bool] = True
    stateless: ClassVar[bool] = True

    def explain(self, repeat: Repeat) -> tuple[str, str, str]:
        """What repeated and how often; which action is useless; and what to do instead."""
        raise NotImplementedError

    def write_message(self, outcome: Outcome, method: str, path: str) -> str:
        """See `Similarity`. Contains no arguments or results of tools."""
        repeat = outcome.repeat
        if repeat is None:
            return super().write_message(outcome, method, path)
        what, again, instead = self.explain(repeat)
        reason = f" {repeat.reason.strip()}" if repeat.reason.strip() else ""
        refused = f"Loop detected: {what}, so this request was refused.{reason}"
        return f"{refused} Neither {again} nor waiting will bring anything new{instead}"

    def advise(self, outcome: Outcome, method: str, path: str) -> Advice:
        """See `Similarity`."""
        repeat = outcome.repeat
        if repeat is None:
            return super().advise(outcome, method, path)
        what, again, instead = self.explain(repeat)
        return Advice(
            what,
            repeat.reason.strip(),
            f"{again[:1].upper()}{again[1:]} will not bring anything new{instead}",
        )


def count_repeats(outcome: Outcome) -> tuple[str, str]:
    """How often a request was sent, and within what time. A cooldown may outlast the window."""
    if outcome.count > 1:
        return f"{outcome.count} times", f"within {format_duration(outcome.span_ms)}"
    return "again", "during the cooldown of its loop"


def format_duration(milliseconds: int) -> str:
    """A duration in a convenient unit, such as `2.5 minutes`."""
    seconds = milliseconds / 1000
    if seconds < 1:
        return "a second"
    for unit, length in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} seconds"
