"""Keeps people's answers about new loops in the store, where every replica reads them."""
# interpreted: tells operators, not requests

from __future__ import annotations

from collections.abc import Iterable

from extproc.operator.canary.review import Answer, ReadAnswers, decode_answer, encode_answer
from extproc.store import Store
from extproc.store.rules.documents import REVIEWS

KEEP_SECONDS = 7_776_000.0
"""90 days: longer than a canary is compared."""


class AnswerBook:
    """The answers about all canaries. Those about a pair of policies that has changed are no longer read, and end."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def keep(self, canary: str, loop: str, person: str, answer: Answer) -> None:
        """Keep a person's answer about a loop, in place of an earlier one.

        Args:
            canary: identity of the pair.
            loop: its hash.
            person: name of 1 to 200 printable ASCII characters.
            answer: to keep.

        Raises:
            StoreError: the store is unavailable.
        """
        await self._store.documents.put(REVIEWS, _name_book(canary), f"{loop} {person}", encode_answer(answer), KEEP_SECONDS)

    async def read(self, canaries: Iterable[str]) -> dict[str, ReadAnswers]:
        """The answers about these canaries, by identity; raises StoreError if the store is unavailable."""
        return {canary: await self._read(canary) for canary in canaries}

    async def _read(self, canary: str) -> ReadAnswers:
        found = await self._store.documents.read(REVIEWS, _name_book(canary))
        answers: ReadAnswers = {}
        for name, document in (found.documents if found is not None else {}).items():
            loop, _, person = name.partition(" ")
            answer = decode_answer(document)
            if answer is not None and person:
                answers.setdefault(loop, {})[person] = answer
        return answers


def _name_book(canary: str) -> str:
    return f"canary:{canary}"
