"""Stacks before models, with a store where several replicas need one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.support.harness import Stack, stack
from tests.support.servers import server
from tests.support.usage import Model


@contextmanager
def open_stack(policies: object, *arguments: str, replicas: int = 1, **options: Any) -> Iterator[Stack]:  # noqa: ANN401  # of `stack`
    """A stack; several replicas share a server of their own."""
    with ExitStack() as opened:
        store = ("--store", f"redis://{opened.enter_context(server()).address}") if replicas > 1 else ()
        yield opened.enter_context(stack(policies, *store, *arguments, replicas=replicas, **options))


@contextmanager
def open_before_model(
    policies: object,
    *arguments: str,
    replicas: int = 1,
    **options: Any,  # noqa: ANN401  # of `stack`
) -> Iterator[tuple[Stack, Model]]:
    """Envoy before a model that replies as it is told."""
    model = Model()
    try:
        with open_stack(policies, *arguments, replicas=replicas, upstream=model.address, **options) as made:
            yield made, model
    finally:
        model.stop()
