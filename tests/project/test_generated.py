from docs import generate
from tests.support.architecture import PAGE, fill_page


def test_reference_is_current() -> None:
    assert generate.PAGE.read_text() == generate.make_page(), "run make reference"


def test_architecture_page_is_current() -> None:
    assert fill_page(PAGE.read_text()) == PAGE.read_text(), "run make reference"
