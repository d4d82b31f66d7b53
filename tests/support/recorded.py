"""Traffic with `--record` in this process, and what a replay of its records makes of it."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from extproc.apis import conversation
from extproc.bounded import Memo
from extproc.cli.replay.judge import Judge
from extproc.cli.replay.records import parse_line
from extproc.decision import Decision, Outcome
from extproc.engine.evaluation import Evaluation
from extproc.ext_proc.service import Service
from extproc.request.hash_key import HashKey
from tests.support.engine import make_engine
from tests.support.messages import body, headers
from tests.support.service import decoded, exchange, make_service, metadata_of

SECRET = bytes(range(32))


def make_cache() -> Memo[int, conversation.KnownMessages]:
    """What a replica knows of conversations."""
    return Memo(2**25, conversation._measure)


def unpack(text: str) -> bytes:
    """The bytes of a digest."""
    return b64decode(text)


class Verdict(NamedTuple):
    """What one detector made of a request."""

    policy: str
    detector: str
    action: str
    number: int
    tenant: str
    loop: tuple[Any, ...]


class Judged(NamedTuple):
    """What all detectors made of a request, and who left it out."""

    verdicts: tuple[Verdict, ...]
    left_out: tuple[tuple[str, str, str], ...]


def judge(evaluation: Evaluation, decision: Decision) -> Judged:
    """All that a decision says, except for fingerprints."""
    return Judged(tuple(_judge(outcome) for outcome in decision.trace), tuple(evaluation.list_left_out()))


def _judge(outcome: Outcome) -> Verdict:
    repeat = outcome.repeat
    loop = () if repeat is None or not repeat.calls else tuple(repeat._replace(before=None))
    return Verdict(outcome.policy, outcome.detector, outcome.action.value, outcome.count, outcome.tenant, loop)


@contextmanager
def note_decisions(judged: list[Judged]) -> Iterator[None]:
    """Note what policies decide, before it turns out whether the body can be edited."""
    decide = Evaluation.decide

    def note(self: Evaluation, *counts: Any) -> Decision:  # noqa: ANN401  # as Evaluation.decide
        decision = decide(self, *counts)
        judged.append(judge(self, decision))
        return decision

    Evaluation.decide = note  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Evaluation.decide = decide  # type: ignore[method-assign]


class Recorder:
    """A replica of `serve --record`.

    Attributes:
        service: the service.
        lines: of its access log.
        judged: what it made of each request.
        metadata: of the newest answer.
    """

    def __init__(self, *policies: Mapping[str, Any], **more: Any) -> None:  # noqa: ANN401  # as make_service
        self.service: Service = make_service(*policies, record=True, **more)
        self.service.key = HashKey(SECRET)
        self.lines: list[str] = []
        self.judged: list[Judged] = []
        self.metadata: dict[str, Any] = {}

    def send(self, request: object, path: str = "/v1/chat/completions", **sent: str) -> dict[str, Any]:
        """Send a request and write its line; returns the record. `sent`: headers, with underscores."""
        data = request if isinstance(request, bytes) else json.dumps(request).encode()
        named: dict[str, Any] = dict(sent)
        with note_decisions(self.judged):
            replies = exchange(self.service, headers(path, **named), body(data))
        self.metadata = metadata_of(decoded(replies[-1]))
        record: dict[str, Any] = self.metadata["record"]
        self.lines.append(json.dumps({"loop_record": record}))
        return record


class Replay:
    """A replay of lines under some policies."""

    def __init__(self, *policies: Mapping[str, Any]) -> None:
        self.judge = Judge(make_engine(*policies), 100_000, HashKey(SECRET))
        self.problems: list[tuple[str, str]] = []

    def add(self, lines: Iterable[str]) -> list[Judged | None]:
        """What the policies make of each request."""
        found: list[Judged | None] = []
        for line in lines:
            answer = self.judge.judge(parse_line(line.encode()))
            found.append(None if answer is None else judge(*answer))
            self.problems += self.judge.take_problems()
        return found


def compare(live: Sequence[Judged], replayed: Sequence[Judged | None]) -> list[tuple[int, Judged, Judged | None]]:
    """The requests about which they differ, with their numbers."""
    assert len(live) == len(replayed)
    return [(number, one, other) for number, (one, other) in enumerate(zip(live, replayed, strict=True)) if one != other]
