"""An answer that is on its way from a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

from extproc.errors import StoreError


class Listener:
    """Who wants to hear of an answer; a call of such an object costs less than one of a function made for it."""

    __slots__ = ()

    def hear(self) -> None:
        """The answer is there."""


class _Function(Listener):
    """A function that wants to hear."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def hear(self) -> None:
        self._function()


class Pending:
    """What a caller waits for: by `await`, or by `then` and `result`.

    A future of asyncio's would tell each caller through the event loop, which costs as much as all else that is done for it.
    Here the code that has the replies of a round trip calls the callers itself.

    Attributes:
        done: the answer is there, or was cancelled.
        cancelled: the caller does not want it any more.
        error: why there will be none.
    """

    __slots__ = ("_answer", "_listener", "cancelled", "done", "error")

    def __init__(self) -> None:
        self.done = False
        self.cancelled = False
        self.error: StoreError | None = None
        self._answer: Any = None
        self._listener: Listener | None = None

    def notify(self, listener: Listener) -> None:
        """Call this listener as soon as the answer is there, and never once it was cancelled; it must not be there yet."""
        self._listener = listener

    def then(self, function: Callable[[], object]) -> None:
        """The same for a function."""
        self._listener = _Function(function)

    def cancel(self) -> None:
        """Want no answer any more."""
        if not self.done:
            self.done = self.cancelled = True
            self._listener = None

    def settle(self, answer: Any, error: StoreError | None = None) -> None:  # noqa: ANN401  # the caller knows its type
        """Tell the answer, or what went wrong, unless it is done."""
        if self.done:
            return
        self.done, self._answer, self.error = True, answer, error
        listener, self._listener = self._listener, None
        if listener is None:
            return
        try:
            listener.hear()
        except Exception as bug:  # noqa: BLE001  # the callers that are told next must not pay for it
            told = {"message": "an answer of the store's was not taken", "exception": bug}
            asyncio.get_running_loop().call_exception_handler(told)

    def result(self) -> Any:  # noqa: ANN401  # as above
        """The answer, once it is done; raises StoreError if there is none."""
        if self.error is not None:
            raise self.error
        return self._answer

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for it."""
        return self._wait().__await__()

    async def _wait(self) -> Any:  # noqa: ANN401  # as above
        if not self.done:
            told = asyncio.Event()
            self.then(told.set)
            try:
                await told.wait()
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self.result()
