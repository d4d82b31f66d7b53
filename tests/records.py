"""Records that tests change."""

from __future__ import annotations

from functools import cache
from inspect import signature
from typing import Any, TypeVar

Record = TypeVar("Record")


def replace(record: Record, **changes: Any) -> Record:  # noqa: ANN401  # the record's own fields
    """A copy of a record, changed as asked; what it is made of are its attributes."""
    made = type(record)
    return made(**{name: getattr(record, name) for name in _list_parameters(made)} | changes)


@cache
def _list_parameters(made: type) -> tuple[str, ...]:
    return tuple(signature(made).parameters)
