"""The endpoints of canaries: anyone may read them, and those with a credential may answer about new loops."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from http import HTTPStatus
from time import time
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from extproc.errors import StoreError
from extproc.operator.admin.credentials import Credentials
from extproc.operator.admin.pages import ANSWER_SECONDS, Page, ask, read_json, send_page
from extproc.operator.canary.answers import AnswerBook
from extproc.operator.canary.pairs import Pair, Pairs
from extproc.operator.canary.report import describe_canaries
from extproc.operator.canary.review import ANSWERS, Answer, ReadAnswers
from extproc.operator.canary.sharing import Sharing
from extproc.operator.canary.states import State
from extproc.operator.canary.verdict import Rules

_LOOP = re.compile(r"[0-9a-f]{16}")


class CanaryEndpoints:
    """What is below `/canary`."""

    def __init__(
        self,
        pairs: Pairs,
        sharing: Sharing,
        book: AnswerBook,
        credentials: Credentials,
        find_loop: Callable[[], asyncio.AbstractEventLoop],
    ) -> None:
        """Report `pairs`; `find_loop` returns the event loop on which the store is asked."""
        self._pairs = pairs
        self._sharing = sharing
        self._book = book
        self._credentials = credentials
        self._find_loop = find_loop

    def list_routes(self) -> list[Route]:
        """The routes of all pages."""
        return [
            Route("/canary/states", self._list_states),
            Route("/canary/samples", self._list_samples),
            Route("/canary/answers", self._answer, methods=["POST"]),
        ]

    def describe(self) -> list[dict[str, Any]]:
        """The report about each canary by the default rules; call it from any thread except the event loop's."""
        collected = asyncio.run_coroutine_threadsafe(self._collect(), self._find_loop())
        replicas, answers = collected.result(ANSWER_SECONDS)
        return describe_canaries([state for replica in replicas.values() for state in replica], Rules(), answers)

    async def _list_states(self, _: Request) -> Response:
        replicas, answers = await ask(self._collect(), self._find_loop())
        found = {"replicas": replicas, "answers": answers}
        return send_page(Page(HTTPStatus.OK, await run_in_threadpool(msgspec.to_builtins, found)))

    async def _list_samples(self, _: Request) -> Response:
        answers = await ask(self._read_answers(), self._find_loop()) or {}
        samples = []
        for pair in self._pairs.list_pairs():
            given = answers.get(pair.pairing.identity, {})
            for sample in pair.samples.list_kept() if pair.samples is not None else ():
                own = {person: answer.answer for person, answer in given.get(sample["id"], {}).items()}
                samples.append({**sample, "canary": pair.pairing.identity, "answers": own})
        return send_page(Page(HTTPStatus.OK, {"kept": self._pairs.samples > 0, "samples": samples}))

    async def _answer(self, request: Request) -> Response:
        """Keep a person's answer; raises HTTPException if it cannot be kept."""
        who = await asyncio.to_thread(self._credentials.check, request)
        pair, loop, word = self._read_answer(await read_json(request))
        person, answer = who.partition(" ")[0], Answer(word, time())
        await ask(self._book.keep(pair.pairing.identity, loop, person, answer), self._find_loop())
        shown = {"policy": pair.pairing.candidate, "loop": loop, "person": person, "answer": word}
        return send_page(Page(HTTPStatus.CREATED, shown))

    def _read_answer(self, given: Any) -> tuple[Pair, str, Any]:  # noqa: ANN401  # decoded JSON
        """The pair, the loop and the word of an answer; raises HTTPException, saying what would be right."""
        fields = ("canary", "loop", "answer")
        if not isinstance(given, dict) or given.keys() != set(fields):
            raise HTTPException(HTTPStatus.BAD_REQUEST, f"an answer is an object with {', '.join(fields)}")
        canary, loop, word = (given[field] for field in fields)
        if word not in ANSWERS:
            raise HTTPException(HTTPStatus.BAD_REQUEST, f"answer must be one of {', '.join(ANSWERS)}")
        if not isinstance(loop, str) or not _LOOP.fullmatch(loop):
            raise HTTPException(HTTPStatus.BAD_REQUEST, "loop must be 16 hex digits, the id of a sample")
        pairs = [pair for pair in self._pairs.list_pairs() if pair.pairing.identity == canary]
        if not pairs:
            changed = "no such canary is compared; if a policy has changed, its comparison and its review start again"
            raise HTTPException(HTTPStatus.CONFLICT, changed)
        return pairs[0], loop, word

    async def _collect(self) -> tuple[dict[str, list[State]], dict[str, ReadAnswers] | None]:
        """What all replicas have counted, and what people say of it."""
        return await self._sharing.collect(), await self._read_answers()

    async def _read_answers(self) -> dict[str, ReadAnswers] | None:
        """The answers about each pair, by its identity; None while the store is away."""
        try:
            return await self._book.read(pair.pairing.identity for pair in self._pairs.list_pairs())
        except StoreError:
            return None  # the store reports that itself
