"""Similarity `mcp`: tool calls over HTTP (MCP), and messages between agents (A2A).

Other requests are not counted: handshakes, lists, notifications, pings, answers, streams, and
`tasks/get`, which polls. `extproc.apis.json_rpc` has the formats of requests and answers.

Headers may announce the body's call. If the body differs, the body counts and the difference is
reported; otherwise, a false header could hide a loop. If a policy trusts its server to refuse such
requests, it needs no bodies of requests that it does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from extproc.apis.json_rpc import (
    McpHeaders,
    contradicts,
    frame_answer,
    read_call,
    read_claim,
    read_id,
    show_call,
    spell_call,
)
from extproc.decision import COMPLETION, Advice, Framed, Outcome
from extproc.detectors.actions import MAX_NAME
from extproc.detectors.base import Similarity, count_repeats
from extproc.detectors.keys import McpKeys, SimilarityKeys
from extproc.detectors.tools import Limit, find_window_errors
from extproc.objects import JsonObject, Place
from extproc.request.document import Document, NotCounted
from extproc.request.quoting import quote


class McpCall:
    """A tool call, or a message to another agent.

    Attributes:
        tool: the tool's name; empty for a message.
        limit: the tool's limit.
        threshold: the limit's threshold.
        tools: the tool; empty for a message.
    """

    def __init__(self, tool: str, limit: Limit, identity: bytes | None) -> None:
        """`identity` is the request's id as sent; None if an answer cannot refer to it."""
        self.tool = tool
        self.limit = limit
        self.threshold: int | None = limit.threshold
        self.tools: tuple[str, ...] = (tool,) if tool else ()
        self._id = identity

    def write_message(
        self, outcome: Outcome, method: str, path: str
    ) -> str:  # the tool tells more than the path
        """See `Similarity`. Does not contain the tool's arguments."""
        advice = self.advise(outcome, method, path)
        reason = f" {advice.reason}" if advice.reason else ""
        return (
            f"Loop detected: {advice.what}, and was refused.{reason} Repeating it will be "
            f"refused again. {advice.instead}"
        )

    # As above
    def advise(self, outcome: Outcome, method: str, path: str) -> Advice:  # noqa: ARG002
        """See `Similarity`."""
        often, when = count_repeats(outcome)
        if self.tool:
            what = f"{quote(self.tool)} has been called {often} with the same arguments"
            progress = "use other arguments"
        else:
            what, progress = f"this same message has been sent {often}", "send a different one"
        instead = (
            f"To continue, {progress}, try another way, or finish with the result you have so far."
        )
        return Advice(f"{what} {when}", self.limit.reason.strip(), instead)

    def frame(self, message: str, accept: str) -> Framed | None:
        """The refusal as an answer of the protocol, see `frame_answer`; None without an id."""
        return None if self._id is None else frame_answer(self._id, self.tool, message, accept)


class Mcp(Similarity):
    """Compares tool calls and messages; has a detector's `tools`."""

    keys: ClassVar[type[JsonObject]] = McpKeys
    looks: ClassVar[bool] = True
    reads_headers: ClassVar[bool] = True

    def __init__(self, keys: SimilarityKeys) -> None:
        self._limits = keys.make_limits(self.default_threshold)
        self._trusts = keys.trust_headers

    def read_headers(self, headers: Mapping[str, bytes]) -> McpHeaders | None:
        """The call that the headers announce; see `Similarity`."""
        claim = read_claim(headers)
        if claim is not None and claim.checked and self._trusts:
            if not claim.is_call:
                raise NotCounted("not_a_call")
            self._check_allowed(claim.name)
        return claim

    def contradicts(self, claim: McpHeaders, document: Document) -> bool:
        """See `Similarity`."""
        return contradicts(claim, document)

    def _check_allowed(self, tool: str) -> None:
        """Raise NotCounted if the tool is exempt."""
        if tool and self._limits.of([tool[:MAX_NAME]]).allow:
            raise NotCounted("allowed_tool")

    def compare(self, document: Document) -> tuple[bytes, None]:
        """The tool and its arguments, or the parts of a message; see `Similarity`."""
        tool, params, _ = read_call(document)
        self._check_allowed(tool)
        return spell_call(tool, params), None

    def find_subject(self, document: Document) -> McpCall:
        """The call itself; see `Similarity`."""
        tool, _, identity = read_call(document)
        shown = tool[:MAX_NAME]
        return McpCall(
            shown, self._limits.of([shown]) if shown else self._limits.of([]), read_id(identity)
        )

    def show(self, document: Document) -> list[str]:
        """See `Similarity`."""
        compared, _ = self.compare(document)
        return [show_call(compared)]

    @staticmethod
    def find_errors(loop: dict[str, Any], place: Place) -> Iterator[tuple[Place, str]]:
        """Keys that have no effect with `mcp`; see `Similarity`."""
        yield from find_window_errors(loop, place)
        if loop.get("refuse_as") == COMPLETION:
            yield (
                (*place, "refuse_as"),
                (
                    "refuse_as must not be completion with similarity mcp, whose refusals are "
                    "answers "
                    "already"
                ),
            )
