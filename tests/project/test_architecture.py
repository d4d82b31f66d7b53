"""docs/architecture.md shows the code as it is."""

from __future__ import annotations

from tests.support.architecture import PAGE, fill_page


def test_the_page_is_up_to_date() -> None:
    """What is committed is what `python -m tests.support.architecture` would write."""
    assert fill_page(PAGE.read_text()) == PAGE.read_text(), "run make reference"
