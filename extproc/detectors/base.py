"""What a similarity says about itself, so that no other module has to know one by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol

from extproc.decision import Advice, Framed, Outcome, Repeat, Subject, ToolFailure
from extproc.detectors.chain import ChainPlace
from extproc.detectors.keys import LoopKeys, SimilarityKeys
from extproc.objects import JsonObject, Place
from extproc.request.document import Document
from extproc.request.quoting import quote

_SEPARATORS: Final = bytes.maketrans(b"\xfe\xff", b"\n|")
"""Between the parts of what is compared, and what people see there; neither of the two ever stands in UTF-8."""

_SHOWN = 200
"""So much of a path is enough to recognise it, in characters."""

_UNITS = (("days", 86_400), ("hours", 3_600), ("minutes", 60))


class Memory(Protocol):
    """What a request leaves to the later ones of its conversation, and what it makes of what earlier ones have left.

    Attributes:
        entry: of the conversation's ring; empty where the request brings nothing, and begins a conversation.
        identity: digest of 8 bytes; a request that is sent again has the same; empty where the session has no name.
        place: where it stands in the conversation that it shows, None where that is not known.
        waits: its verdict waits for what earlier ones have left.
    """

    entry: bytes
    identity: bytes
    place: ChainPlace | None
    waits: bool

    def recall(self, entries: Sequence[bytes], *, followed: bool = False) -> Repeat | None:
        """What `compare` says about a loop, given the ring's entries, the oldest first and this request's own among them.

        `followed`: all of them are of the conversation that the request shows, whatever it leaves out.
        """
        ...


class Similarity:
    """What a detector compares; `exact` as it stands here, others by what they override.

    Attributes:
        keys: the keys of a loop_detection entry that are its own, beside those of `LoopKeys`.
        looks: `compare` is called with the body, whose bytes are kept for it; otherwise the body's checksums are compared.
        reads_ends: of a body that is too long to be looked into, an excerpt is enough; see `Excerpt`.
        reads_headers: they may say what stands in the body.
        stateless: a request says itself whether it is part of a loop. Nothing is counted, the store keeps the cooldown alone.
        remembers: what a request does not show, earlier ones of its session may have shown.
        default_threshold: of an entry that has none; None where each has to say it.
    """

    keys: ClassVar[type[JsonObject]] = LoopKeys
    looks: ClassVar[bool] = False
    reads_ends: ClassVar[bool] = False
    reads_headers: ClassVar[bool] = False
    stateless: ClassVar[bool] = False
    remembers: ClassVar[bool] = False
    default_threshold: ClassVar[int | None] = None

    def __init__(self, keys: SimilarityKeys) -> None:
        """Compile the keys of an entry that is enabled."""

    def read_headers(self, headers: Mapping[str, bytes]) -> Any:  # noqa: ANN401, ARG002  # others read them
        """What the headers of a request say about its body, for `contradicts`; None where that is nothing.

        Raises:
            NotCounted: they are enough to know that the request is not counted.
        """
        return None

    def contradicts(self, claim: Any, document: Document) -> bool:  # noqa: ANN401, ARG002  # others read headers
        """Whether a body is something else than the headers say."""
        return False

    def compare(self, document: Document) -> tuple[bytes | None, Repeat | None]:  # noqa: ARG002  # others look into it
        """Look into a body.

        Returns:
            what is compared, in one spelling: `b""` leaves the body out, None compares the body itself;
            what the request itself says about a loop; None where requests are counted.

        Raises:
            NotCounted: there is nothing to compare.
        """
        return None, None

    def compare_in_session(
        self,
        document: Document,
        *,
        named: bool = True,  # noqa: ARG002  # others have no use for a name
    ) -> tuple[bytes | None, Repeat | None, Memory | None]:
        """The same for a request of a known caller, and what is kept of it; None where that is nothing.

        Args:
            document: the body.
            named: the request names its session.

        Raises:
            NotCounted: as `compare`.
        """
        return *self.compare(document), None

    def find_subject(self, document: Document) -> Subject:  # noqa: ARG002  # others look into it
        """What a body is about, which tells the model; the similarity itself where it is told the same of every body.

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

    def frame(self, message: str, accept: str) -> Framed | None:  # noqa: ARG002  # others have shapes
        """See `Subject`."""
        return None

    def find_failure(self, document: Document) -> ToolFailure | None:  # noqa: ARG002  # others look at results
        """The failure that a loop repeats, by which others are recognised as the same incident; None if that is no tool's."""
        return None

    def show(self, document: Document) -> list[str]:  # noqa: ARG002  # others look into it
        """What is compared, as lines for people.

        Raises:
            NotCounted: as `compare`.
        """
        return []

    def quote(self, compared: bytes, document: Document, most: int) -> str:  # noqa: ARG002  # hashes are quoted from there
        """What was compared, in lines for people who judge a refusal.

        Args:
            compared: what `compare` has returned.
            document: of which.
            most: characters.
        """
        return compared[:most].translate(_SEPARATORS).decode("utf-8", "replace")

    def describe(self, repeat: Repeat | None) -> str:  # noqa: ARG002  # others have something to say
        """What the request itself says about a loop, in a few words for people."""
        return ""

    def write_message(self, outcome: Outcome, method: str, path: str) -> str:
        """What repeated, how often, over what span and what to do instead, in words that a model can act on."""
        return (
            f"Loop detected: {self.advise(outcome, method, path).what} and was refused. "
            "If sent again, it will be refused again. "
            "Do not retry it unchanged: change the approach or the input, or stop and report the result you have so far."
        )

    def advise(self, outcome: Outcome, method: str, path: str) -> Advice:
        """See `Subject`."""
        repeated = self.name_repeated(f"({quote(method)} {quote(path, _SHOWN)})")
        what = f"{repeated} has been sent {outcome.count} times within {format_duration(outcome.span_ms)}"
        return Advice(what, "", "Change the approach or the input, or stop and report the result you have so far.")

    def name_repeated(self, place: str) -> str:
        """The subject of that sentence; `place` is method and path in brackets."""
        return f"this identical request {place}"

    @staticmethod
    def find_errors(loop: dict[str, Any], place: Place) -> Iterator[tuple[Place, str]]:  # noqa: ARG004  # others have rules
        """Rules between its own keys in one raw loop_detection entry: the place of each error, and what would be right."""
        yield from ()


class HistorySimilarity(Similarity):
    """What looks for a loop in the history that a request carries itself."""

    looks: ClassVar[bool] = True
    stateless: ClassVar[bool] = True

    def explain(self, repeat: Repeat) -> tuple[str, str, str]:
        """What repeated and how often; what brings nothing new, and what to do instead, which ends that sentence."""
        raise NotImplementedError

    def write_message(self, outcome: Outcome, method: str, path: str) -> str:
        """See `Similarity`; what the tools were called with and what they said stays out of it."""
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
        return Advice(what, repeat.reason.strip(), f"{again.capitalize()} will not bring anything new{instead}")


def format_duration(milliseconds: int) -> str:
    """A span in the unit that a reader would use, such as `2.5 minutes`."""
    seconds = milliseconds / 1000
    if seconds < 1:
        return "a second"
    for unit, length in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} seconds"
