"""Documents in Redis or Valkey: three keys in one hash slot for each subject.

`rules/documents.lua` writes them.
"""
# interpreted: waits for a network

from __future__ import annotations

from collections.abc import Callable

from extproc.errors import StoreError
from extproc.store.link import RedisReply
from extproc.store.rules import read_script
from extproc.store.rules.documents import KINDS, Documents, check_document, refuse_more
from extproc.store.side_connections import SideConnections

_SCRIPT = read_script("documents")


class RemoteDocuments:
    """Documents on a server, over connections of their own; see `SharedDocuments`."""

    def __init__(self, connections: SideConnections, check: Callable[[str], None]) -> None:
        """Use these connections; `check` raises StoreError if a subject's server is unavailable."""
        self._connections = connections
        self._check = check

    async def put(  # noqa: PLR0913  # a document and its place
        self,
        kind: str,
        subject: str,
        name: str,
        document: bytes,
        seconds: float,
        now: int | None = None,
    ) -> None:
        """See `SharedDocuments`."""
        check_document(kind, name, document)
        bounds = KINDS[kind]
        most = bounds.max_documents, int(bounds.makes_room)
        if not await self._run(
            kind,
            subject,
            "put",
            name,
            bounds.version + document,
            int(seconds * 1000),
            *most,
            now=now,
        ):
            raise refuse_more()

    async def drop(self, kind: str, subject: str, name: str, now: int | None = None) -> bool:
        """See `SharedDocuments`."""
        return bool(await self._run(kind, subject, "drop", name, now=now))

    async def read(
        self, kind: str, subject: str, known: str = "", now: int | None = None
    ) -> Documents | None:
        """See `SharedDocuments`."""
        listed = await self._run(kind, subject, "list", known, now=now)
        if not isinstance(listed, list) or not all(isinstance(item, bytes) for item in listed):
            raise _make_error(kind)
        if not listed:
            return None
        version, *names = [bytes(item).decode("utf-8", "replace") for item in listed]
        documents: dict[str, bytes] = {}
        size, mark = KINDS[kind].portion, KINDS[kind].version
        key = self._connections.name_key(kind, subject, "documents")
        for start in range(0, len(names), size):
            portion = names[start : start + size]
            [found] = await self._connections.ask(subject, [("HMGET", key, *portion)])
            if not isinstance(found, list) or len(found) != len(portion):
                raise _make_error(kind)
            for name, text in zip(portion, found, strict=True):
                if isinstance(text, bytes) and text.startswith(mark):
                    documents[name] = text[len(mark) :]
        return Documents(version, documents)

    async def _run(
        self, kind: str, subject: str, what: str, *arguments: str | bytes | int, now: int | None
    ) -> RedisReply:
        """Run the script; its last argument is the time in milliseconds, or -1."""
        self._check(subject)
        keys = [
            self._connections.name_key(kind, subject, part)
            for part in ("ends", "documents", "version")
        ]
        moment = -1 if now is None else now
        [reply] = await self._connections.ask(
            subject, [("EVAL", _SCRIPT, len(keys), *keys, what, *arguments, moment)]
        )
        return reply


def _make_error(kind: str) -> StoreError:
    return StoreError(
        f"the server did not answer with a list of {KINDS[kind].plural}", kind="response"
    )
