from collections.abc import Callable, Sequence
from typing import Any

from extproc.decision import Outcome
from extproc.engine.engine import Engine
from extproc.metrics import Metrics
from extproc.store.memory import MemoryStore
from tests.support.documents import policy
from tests.support.engine import ANY, make_engine
from tests.support.looping import looked_into, post
from tests.support.turn_writers import SHAPES, STYLES, Did, as_observed, as_text

Write = Callable[[Sequence[Did]], dict[str, Any]]


WRITERS: dict[str, Write] = {
    **SHAPES,
    **{
        f"text, {name}": lambda turns, style=style: as_text(turns, style)  # type: ignore[misc]
        for name, style in STYLES.items()
    },
    "observed": as_observed,
}


STATELESS = ("turns", "tool_calls")


class Guard:
    """A policy with a memory store and its own clock."""

    def __init__(self, **loop: Any) -> None:  # noqa: ANN401  # keys of loop_detection
        self.engine: Engine = make_engine(policy("p", ANY, limit_keys=["header:x-user"], **loop))
        self._store = MemoryStore(Metrics())

    def judge(self, data: bytes, now: float = 0) -> Outcome:
        check = looked_into(self.engine, data, post(x_user="ann"))
        decision = check.decide(self._store.hit(check.enforcing.list_hits(), int(now * 1000)))
        (outcome,) = decision.trace
        return outcome

    def send(self, data: bytes, now: float = 0) -> str:
        return self.judge(data, now).action.value
