"""A fast test whether a text contains any of many patterns, before `re` searches for each."""

from __future__ import annotations

from collections.abc import Callable

from pydantic_core import SchemaValidator, core_schema


def look_for(pattern: str) -> Callable[[str], bool]:
    r"""A function that returns whether a pattern occurs in a text.

    pydantic searches with Rust's `regex`: linear time, and each character is read once for any
    number of alternatives. `re` tries one alternative after the other.

    Args:
        pattern: in the verbose syntax of Rust's `regex`: write a space as `\ `, in classes, too;
            there are no lookarounds. Prefer `*` and `+`, because bounded repetitions cost memory
            and time. A text with lone surrogates, which no JSON contains, matches nothing.
    """
    return SchemaValidator(
        core_schema.str_schema(pattern=f"(?x){pattern}", strict=True)
    ).isinstance_python
