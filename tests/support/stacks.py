"""Stacks with a model behind them."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from extproc.sessions.names import hash_session
from tests.support.harness import Stack, eventually, stack
from tests.support.servers import server
from tests.support.usage import Model


@contextmanager
def open_stack(
    policies: object,
    *arguments: str,
    replicas: int = 1,
    **options: Any,  # noqa: ANN401  # of `stack`
) -> Iterator[Stack]:
    """A stack. Several replicas share a new server unless the flags name one."""
    with ExitStack() as opened:
        alone = replicas > 1 and "--store" not in arguments
        store = ("--store", f"redis://{opened.enter_context(server()).address}") if alone else ()
        yield opened.enter_context(
            stack(policies, *store, *arguments, replicas=replicas, **options)
        )


@contextmanager
def open_before_model(
    policies: object,
    *arguments: str,
    replicas: int = 1,
    **options: Any,  # noqa: ANN401  # of `stack`
) -> Iterator[tuple[Stack, Model]]:
    model = Model()
    try:
        with open_stack(
            policies, *arguments, replicas=replicas, upstream=model.address, **options
        ) as made:
            yield made, model
    finally:
        model.stop()


def await_session(made: Stack, name: str, **expected: object) -> dict[str, Any]:
    page = f"/sessions/{hash_session('header:x-session-id', name)}"

    def probe() -> dict[str, Any] | None:
        for replica in made.replicas:
            for run in json.loads(replica.get(page)[1]).get("sessions", ()):
                if expected.items() <= run.items():
                    return dict(run)
        return None

    return eventually(probe, f"session {name} with {expected}")
