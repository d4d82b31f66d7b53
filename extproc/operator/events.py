"""Events for other programs.

CloudEvents 1.0 (github.com/cloudevents/spec, v1.0.2), written to a file or sent to a webhook.

`emit` puts an event into a bounded queue and returns; a background thread delivers it. If the queue
is full, events are dropped and counted. A webhook gets batches in the JSON batch format, and each
batch is retried until it is accepted. With a secret, batches are signed according to Standard
Webhooks (github.com/standard-webhooks): an HMAC-SHA256 of id, time and body.
"""
# interpreted: waits for a receiver

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import os
import secrets
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol, TypeAlias

from extproc.errors import LoopguardError, UsageError
from extproc.logs import Reminder, make_extra
from extproc.metrics import Metrics
from extproc.settings import Settings

if TYPE_CHECKING:
    import httpx

_LOG = logging.getLogger("loopguard")

TYPES: Final = {
    "loop_began": "io.loopguard.loop.began.v1",
    "loop_escalated": "io.loopguard.loop.escalated.v1",
    "loop_ended": "io.loopguard.loop.ended.v1",
    "loop_released": "io.loopguard.loop.released.v1",
    "session_limited": "io.loopguard.session.limited.v1",
    "agents_limited": "io.loopguard.agents.limited.v1",
    "session_killed": "io.loopguard.session.killed.v1",
    "session_granted": "io.loopguard.session.granted.v1",
    "budget_reached": "io.loopguard.budget.reached.v1",
    "budget_refused": "io.loopguard.budget.refused.v1",
    "budget_granted": "io.loopguard.budget.granted.v1",
    "breaker_opened": "io.loopguard.breaker.opened.v1",
    "override_given": "io.loopguard.override.given.v1",
    "override_revoked": "io.loopguard.override.revoked.v1",
    "policy_promoted": "io.loopguard.policy.promoted.v1",
    "tool_failing": "io.loopguard.tool.failing.v1",
    "store_lost": "io.loopguard.store.lost.v1",
    "store_back": "io.loopguard.store.back.v1",
    "store_emptied": "io.loopguard.store.emptied.v1",
}
"""Types by kind.

A type ends with its version, which changes if a field changes its meaning, not if one is added.
"""

MAX_QUEUED = 10_000
MAX_BATCH = 100

GATHER_SECONDS = 0.5
FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 30.0
_ANSWER_SECONDS = 10.0
_MOST_ANSWERED = 2**16
LAST_SECONDS = 2.0
"""How long shutdown waits for the queue to drain."""

_REMIND_SECONDS = 60.0
_TRY_AGAIN = frozenset({408, 425, 429})
_SERVER_ERRORS = 500


class RefusedError(LoopguardError):
    """The receiver rejected the events; a retry would not help."""


class UnreachableError(LoopguardError):
    """The receiver cannot accept the events now; a retry may work."""


_Queued: TypeAlias = tuple[str, str, float, Mapping[str, object]]
"""Kind, subject, time in seconds since 1970, and data."""


class Sink(Protocol):
    """Where events go."""

    def send(self, events: Sequence[bytes]) -> None:
        """Send events, each as JSON; raises UnreachableError or RefusedError."""

    def close(self) -> None:
        """Close the file or the connection."""


class Events:
    """The queue and the thread that drains it."""

    def __init__(self, sink: Sink, source: str, metrics: Metrics) -> None:
        """Start the thread; `source` names this process in every event."""
        self._sink = sink
        self._source = source
        self._counter = metrics.events
        self._queue: deque[_Queued] = deque()
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._reminder = Reminder(_REMIND_SECONDS)
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def emit(self, kind: str, subject: str, data: Mapping[str, object]) -> None:
        """Queue an event of a kind in `TYPES`.

        Never blocks; thread-safe. None values are left out of `data`.
        """
        if len(self._queue) >= MAX_QUEUED:
            self._drop(1, "the queue is full")
            return
        self._queue.append((kind, subject, time.time(), data))
        self._wake.set()

    def close(self) -> None:
        """Send the remaining events within LAST_SECONDS; drop the rest."""
        self._ending.set()
        self._wake.set()
        self._thread.join(LAST_SECONDS)
        self._drop(len(self._take(MAX_QUEUED)), "the process ends")

    def _run(self) -> None:
        while not (self._ending.is_set() and not self._queue):
            self._wake.wait()
            self._wake.clear()
            self._ending.wait(GATHER_SECONDS)  # batches events that occur together
            while batch := self._take(MAX_BATCH):
                try:
                    self._deliver([write_event(*event, source=self._source) for event in batch])
                except Exception as error:  # noqa: BLE001  # a bad batch must not end the thread
                    self._drop(len(batch), f"{type(error).__name__}: {error}")
        self._sink.close()

    def _take(self, most: int) -> list[_Queued]:
        """Remove the oldest events from the queue.

        `close` may do so at the same time as the thread.
        """
        taken: list[_Queued] = []
        with suppress(IndexError):  # the queue is empty
            while len(taken) < most:
                taken.append(self._queue.popleft())
        return taken

    def _deliver(self, events: Sequence[bytes]) -> None:
        waits = FIRST_WAIT_SECONDS
        while True:
            try:
                self._sink.send(events)
            except UnreachableError as error:
                if self._reminder.count(time.monotonic()):
                    _LOG.warning(
                        "events are not accepted, trying again", extra=make_extra(reason=str(error))
                    )
                if self._ending.wait(waits * (0.5 + secrets.randbelow(1_000) / 1_000)):
                    self._drop(len(events), str(error))
                    return
                waits = min(2 * waits, _LONGEST_WAIT_SECONDS)
            except RefusedError as error:
                self._drop(len(events), str(error))
                return
            else:
                self._counter.labels("sent").inc(len(events))
                return

    def _drop(self, number: int, reason: str) -> None:
        if number:
            self._counter.labels("dropped").inc(number)
            if self._reminder.count(time.monotonic()):
                _LOG.warning("events are dropped", extra=make_extra(reason=reason))


def open_events(settings: Settings, source: str, metrics: Metrics) -> Events | None:
    """Open the target of `--events`, if any; raises UsageError or LoopguardError."""
    if not settings.events:
        return None
    return Events(_open_sink(settings), source, metrics)


def write_event(
    kind: str, subject: str, at: float, data: Mapping[str, object], *, source: str
) -> bytes:
    """Encode an event in the JSON event format."""
    # Takes 0.1 s, and most deployments send none
    from cloudevents.core.formats.json import JSONFormat  # noqa: PLC0415
    from cloudevents.core.v1.event import CloudEvent  # noqa: PLC0415  # as above

    attributes = {
        "type": TYPES[kind],
        "source": source,
        "subject": subject or "loopguard",
        "time": datetime.fromtimestamp(at, UTC),
        "datacontenttype": "application/json",
    }
    shown = {name: value for name, value in data.items() if value is not None}
    return JSONFormat().write(CloudEvent(attributes, shown))


def sign(secret: bytes, identity: str, at: int, body: bytes) -> str:
    """The `webhook-signature` of a body, according to Standard Webhooks."""
    digest = hmac.new(secret, f"{identity}.{at}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def _open_sink(settings: Settings) -> Sink:
    place = settings.events
    if place.startswith("https://"):
        return _Webhook(place, _read_secret(settings.events_secret_file), settings.events_ca)
    if "://" in place:
        raise UsageError(f"--events must be a file, - or https://..., not {place!r}")
    try:
        return _Lines(
            os.fdopen(os.dup(sys.stdout.fileno()), "wb") if place == "-" else Path(place).open("ab")
        )
    except OSError as error:
        raise LoopguardError(
            f"cannot write events to {place}: {error.strerror}; choose another with --events"
        ) from None


def _read_secret(path: str) -> bytes:
    """The key of a Standard Webhooks secret (`whsec_` and base64), otherwise the file's bytes."""
    if not path:
        return b""
    try:
        secret = Path(path).read_bytes().strip()
        return (
            base64.b64decode(secret.removeprefix(b"whsec_"), validate=True)
            if secret.startswith(b"whsec_")
            else secret
        )
    except (OSError, ValueError) as error:
        raise LoopguardError(f"--events-secret-file {path}: {error}") from None


class _Lines:
    """A file or standard output, one line per event."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def send(self, events: Sequence[bytes]) -> None:
        try:
            self._file.write(b"".join(event + b"\n" for event in events))
            self._file.flush()
        except OSError as error:
            raise UnreachableError(str(error)) from None

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


class _Webhook:
    """An HTTPS endpoint for batches."""

    def __init__(self, url: str, secret: bytes, authorities: str) -> None:
        import httpx  # noqa: PLC0415  # takes 0.2 s, and most deployments send none

        self._secret = secret
        self._errors = httpx.HTTPError
        try:
            context = ssl.create_default_context(cafile=authorities or None)
        except OSError as error:
            raise LoopguardError(f"--events-ca {authorities}: {error}") from None
        try:
            httpx.URL(url)
        except httpx.InvalidURL as error:
            raise UsageError(f"--events {url}: {error}") from None
        self._url = url
        self._client: httpx.Client = httpx.Client(
            verify=context, timeout=_ANSWER_SECONDS, follow_redirects=False
        )

    def send(self, events: Sequence[bytes]) -> None:
        body = b"[" + b",".join(events) + b"]"
        try:
            headers = {"content-type": "application/cloudevents-batch+json; charset=utf-8"}
            if self._secret:
                identity, at = f"msg_{secrets.token_hex(12)}", int(time.time())
                headers |= {
                    "webhook-id": identity,
                    "webhook-timestamp": str(at),
                    "webhook-signature": sign(self._secret, identity, at, body),
                }
            with self._client.stream("POST", self._url, content=body, headers=headers) as answer:
                # Only the status matters, but reading a short body to its end lets the connection
                # be reused.
                ends = time.monotonic() + _ANSWER_SECONDS
                sizes = accumulate(map(len, answer.iter_raw()))
                any(size > _MOST_ANSWERED or time.monotonic() > ends for size in sizes)
        except self._errors as error:
            raise UnreachableError(str(error) or type(error).__name__) from None
        if answer.status_code in _TRY_AGAIN or answer.status_code >= _SERVER_ERRORS:
            raise UnreachableError(f"the receiver answers {answer.status_code}")
        if not answer.is_success:
            raise RefusedError(f"the receiver answers {answer.status_code}")

    def close(self) -> None:
        with suppress(Exception):
            self._client.close()
