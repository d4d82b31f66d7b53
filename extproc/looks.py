"""Fast looks: whether a text contains any of many patterns, before `re` searches for each of them."""

from __future__ import annotations

from collections.abc import Callable

from pydantic_core import SchemaValidator, core_schema


def look_for(pattern: str) -> Callable[[str], bool]:
    r"""A function that returns whether a pattern occurs in a text.

    pydantic searches with Rust's `regex`, which reads each character once, however many alternatives there are, and takes
    linear time for any text. `re` tries one alternative after the other.

    Args:
        pattern: in the syntax of Rust's `regex`, verbose: spaces count only as `\ `, in classes, too. It has no lookarounds.
            Repeat with `*` and `+`, because each bounded repetition costs memory and time. A text with lone surrogates, which
            no JSON contains, matches nothing.
    """
    return SchemaValidator(core_schema.str_schema(pattern=f"(?x){pattern}", strict=True)).isinstance_python
