from collections.abc import Iterable
from typing import Any

import pytest


def deepen(values: Iterable[Any], *shallow: object) -> list[Any]:
    """Parameters for pytest. All but those in `shallow` are marked `deep`."""
    every = list(values)
    if left := [value for value in shallow if value not in every]:
        raise ValueError(f"not among the parameters: {left}")
    return [value if value in shallow else _mark(value) for value in every]


def _mark(value: Any) -> Any:  # noqa: ANN401  # whatever a test takes
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.deep)
