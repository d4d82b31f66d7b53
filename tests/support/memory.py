"""The caches of a process."""

import gc
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from extproc.bounded import Memo


def _list_values() -> Iterator[object]:
    modules = [module for name, module in sys.modules.items() if name.startswith("extproc.")]
    for module in modules:
        for value in vars(module).values():
            yield value
            home: object = type(value).__module__  # of a compiled class it may be a descriptor
            if not isinstance(home, str) or home.startswith("extproc."):
                yield from gc.get_referents(value)
                yield from getattr(value, "__dict__", {}).values()


@cache
def list_memos() -> list[Memo[Any, Any]]:
    found = {id(value): value for value in _list_values() if isinstance(value, Memo)}
    return list(found.values())


@cache
def _list_functions() -> list[Any]:
    modules = [module for name, module in sys.modules.items() if name.startswith("extproc.")]
    found = {
        id(value): value
        for module in modules
        for value in vars(module).values()
        if hasattr(value, "cache_parameters")
    }
    return [value for value in found.values() if value.cache_parameters()["maxsize"] is not None]


def forget() -> None:
    for memo in list_memos():
        memo.clear()
    for function in _list_functions():
        function.cache_clear()
