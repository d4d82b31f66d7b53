"""Sessions: which conversation a request belongs to, and where the store keeps what that has shown.

A client chooses these names, so they only ever tell conversations of one tenant apart, and none of them is longer in a key than
any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from extproc.fingerprint import join_descriptors
from extproc.policy.bundle import BODY, UNSUPPORTED_KEYS, Session
from extproc.request import Descriptor, HttpRequest, compile_descriptors
from extproc.similarity.base import Memory
from extproc.similarity.document import Document, NotJson, find, split_pointer
from extproc.similarity.loops import MAX_TURNS
from extproc.windows import Push

_DIGEST = 8


class Sessions:
    """A policy's, ready to be told apart.

    Attributes:
        reads_body: some name may stand there.
        idle_seconds: how long after its last request a session is forgotten.
    """

    def __init__(self, policy: str, session: Session, *, namespace: str) -> None:
        """Compile; every key starts with the namespace."""
        keys = compile_descriptors([key for key in session.keys if key not in UNSUPPORTED_KEYS])
        self._keys = [(key, split_pointer(key.argument) if key.source == BODY else []) for key in keys]
        self.reads_body = any(key.source == BODY for key in keys)
        self._ring = f"{namespace}ring:{policy}:"
        self.idle_seconds = session.idle_seconds
        self._idle_ms = session.idle_seconds * 1000

    def list_keys(self) -> list[Descriptor]:
        """Where the name may stand."""
        return [key for key, _ in self._keys]

    def read(self, request: HttpRequest) -> list[str]:
        """A request's value for each key; empty where it has none, or where that stands in the body."""
        return [key.read(request, key.argument) for key, _ in self._keys]

    def find(self, values: Sequence[str], document: Document) -> str:
        """The name of a request's session, 16 hex digits; empty where it has none.

        Args:
            values: what `read` returned.
            document: the body.
        """
        for (key, pointer), value in zip(self._keys, values, strict=True):
            found = _find_in_body(document, pointer) if pointer else value
            if found:
                name = join_descriptors([(key.key, found)])
                return blake2b(name.encode("utf-8", "surrogateescape"), digest_size=_DIGEST).hexdigest()
        return ""

    def make_push(self, detector: str, scope: str, tenant: str, session: str, memory: Memory) -> Push:
        """What the store is asked to keep of a request for one detector."""
        key = f"{self._ring}{detector}:{scope}:{tenant}:{session}"
        return Push(key, memory.entry, memory.identity, MAX_TURNS, self._idle_ms)


def _find_in_body(document: Document, pointer: Sequence[str]) -> str:
    try:
        return find(document.value(), pointer)
    except NotJson:
        return ""
