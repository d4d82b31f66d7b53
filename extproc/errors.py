"""Errors, each with what its recipient needs: a message for people or a status code for a peer."""
# interpreted: only exceptions

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_KEPT = 20
_KEPT_CHARACTERS = 400


class LoopguardError(Exception):
    """The root of every error that Loopguard raises on purpose."""


class UsageError(LoopguardError):
    """An invalid flag or environment variable; the command exits 2."""


@dataclass(frozen=True, slots=True)
class BundleError:
    """One error at one place of a policy file.

    Attributes:
        file: the file as the user named it.
        pointer: JSON Pointer (RFC 6901) to the place; empty for the whole file.
        message: what is wrong and what would be right.
    """

    file: str
    pointer: str
    message: str

    def __str__(self) -> str:
        """`file: /json/pointer: message`, the form that `loopguard validate` prints."""
        return f"{self.file}: {self.pointer or '/'}: {self.message}"


class BundleErrors(LoopguardError):
    """Every error of every policy file, ordered by file and place."""

    def __init__(self, errors: Sequence[BundleError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(map(str, self.errors)))


def excerpt(problems: Sequence[object]) -> list[str]:
    """The first problems, each shortened, so that the list stays small."""
    texts = map(str, problems[:_KEPT])
    return [
        text if len(text) <= _KEPT_CHARACTERS else f"{text[:_KEPT_CHARACTERS]}..." for text in texts
    ]


class BadOrderError(LoopguardError):
    """An operator's order is invalid; the message lists everything that is wrong with it."""


class StoreError(LoopguardError):
    """The store could not count; `kind` is a short fixed word for metrics, such as `timeout`."""

    def __init__(self, message: str, *, kind: str) -> None:
        self.kind = kind
        super().__init__(message)


class PartlyAwayError(StoreError):
    """Some shards have counted and others could not; `answers` has None for each of the latter."""

    def __init__(self, message: str, *, kind: str, answers: list[Any]) -> None:
        self.answers = answers
        super().__init__(message, kind=kind)


class ProtocolError(LoopguardError):
    """The peer broke the protocol; `code` is the gRPC status or HTTP/2 error code to send."""

    def __init__(self, message: str, *, code: int) -> None:
        self.code = code
        super().__init__(message)
