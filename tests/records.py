"""Records that tests change."""

from __future__ import annotations

from inspect import signature
from typing import Any, TypeVar

Record = TypeVar("Record")


def replace(record: Record, **changes: Any) -> Record:  # noqa: ANN401  # the record's own fields
    """A copy of a record, changed as asked; what it is made of are its attributes."""
    made = type(record)
    return made(**{name: getattr(record, name) for name in signature(made).parameters} | changes)
