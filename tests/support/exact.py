"""Detector modules without the shortcuts that decide whether a text is searched at all."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any
from unittest.mock import patch

from tests.support import ROOT

# Patterns up to this length are the rule itself; longer ones are shortcuts.
_LONGEST_EXACT = 40


class AskEachTime:
    def __init__(self, *_: object, **__: object) -> None:
        pass

    def find(self, _: str) -> bool:
        return True


def _look_for(pattern: str) -> Any:  # noqa: ANN401  # a function
    if len(pattern) <= _LONGEST_EXACT:
        return re.compile(pattern).search
    return lambda _: True


def load_exact(name: str) -> Any:  # noqa: ANN401  # a module
    """A second copy of a module of `extproc.detectors` that searches every text and line."""
    spec = spec_from_file_location(f"exact_{name}", ROOT / "extproc" / "detectors" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with (
        patch("extproc.looks.look_for", _look_for),
        patch("extproc.detectors.shapes.Stays", AskEachTime),
    ):
        spec.loader.exec_module(module)
    return module
