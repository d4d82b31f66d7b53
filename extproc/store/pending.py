"""An answer that a server has not sent yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

from extproc.errors import StoreError


class Listener:
    """An object that is called with an answer; calling it is cheaper than calling a closure."""

    def hear(self) -> None:
        """Process the answer, which has arrived."""


class _Function(Listener):
    """A listener that calls a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def hear(self) -> None:
        self._function()


class Pending:
    """An answer to wait for: with `await`, or with `then` and `result`.

    An asyncio future would notify each caller through the event loop, which costs as much as all
    the rest. Here, the code that receives the replies of a round trip calls the listeners itself.

    Attributes:
        done: the answer has arrived, or was cancelled.
        cancelled: the caller no longer needs it.
        error: why there will be no answer.
    """

    def __init__(self) -> None:
        self.done = False
        self.cancelled = False
        self.error: StoreError | None = None
        self._answer: Any = None
        self._listener: Listener | None = None

    def notify(self, listener: Listener) -> None:
        """Call this listener when the answer arrives, unless it is cancelled.

        The answer must not have arrived yet.
        """
        self._listener = listener

    def then(self, function: Callable[[], object]) -> None:
        """Call this function when the answer arrives; see `notify`."""
        self._listener = _Function(function)

    def cancel(self) -> None:
        """Stop waiting; no listener is called any more."""
        if not self.done:
            self.done = self.cancelled = True
            self._listener = None

    # The caller knows its type
    def settle(self, answer: Any, error: StoreError | None = None) -> None:  # noqa: ANN401
        """Set the answer or the error, unless one is set or the wait was cancelled."""
        if self.done:
            return
        self.done, self._answer, self.error = True, answer, error
        listener, self._listener = self._listener, None
        if listener is None:
            return
        try:
            listener.hear()
        except Exception as bug:  # noqa: BLE001  # a listener's bug must not affect others
            told = {"message": "the callback for an answer of the store failed", "exception": bug}
            asyncio.get_running_loop().call_exception_handler(told)

    def result(self) -> Any:  # noqa: ANN401  # as above
        """The answer, after it has arrived; raises StoreError if there is none."""
        if self.error is not None:
            raise self.error
        return self._answer

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for it."""
        return self._wait().__await__()

    async def arrive(self) -> None:
        """Wait until the answer has arrived, or the error.

        A caller that is cancelled does not cancel it.
        """
        if not self.done:
            told = asyncio.Event()
            self.then(told.set)
            await told.wait()

    async def _wait(self) -> Any:  # noqa: ANN401  # as above
        try:
            await self.arrive()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result()
