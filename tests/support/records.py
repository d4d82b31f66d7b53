from inspect import signature
from typing import Any, TypeVar

Record = TypeVar("Record")

_parameters: dict[object, tuple[str, ...]] = {}


def replace(record: Record, **changes: Any) -> Record:  # noqa: ANN401  # the record's own fields
    made = type(record)
    if made not in _parameters:
        _parameters[made] = tuple(signature(made).parameters)
    return made(**{name: getattr(record, name) for name in _parameters[made]} | changes)
