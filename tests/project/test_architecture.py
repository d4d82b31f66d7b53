"""docs/architecture.md shows the code as it is."""

from __future__ import annotations

import pytest

from tests.support.architecture import PAGE, fill_page


def test_the_page_is_up_to_date() -> None:
    """What is committed is what `python -m tests.support.architecture` would write."""
    assert fill_page(PAGE.read_text()) == PAGE.read_text(), "run make reference"


def test_a_page_without_a_place_is_refused() -> None:
    """A part that no longer stands in the page does not vanish in silence."""
    with pytest.raises(ValueError, match="no place for the picture"):
        fill_page("# Architecture\n")
