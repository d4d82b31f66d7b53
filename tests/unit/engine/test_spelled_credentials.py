"""One credential in several spellings is one caller."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from extproc.engine.engine import Engine
from extproc.policy.loader import parse
from extproc.request.http import HttpRequest, compile_descriptors
from tests.support.documents import bundle
from tests.support.kill_switches import GUARDED, switch

NOW = datetime(2026, 6, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "sent", "expected"),
    [
        ("Bearer sk-1", "Bearer sk-1", True),
        ("Bearer sk-1", "bearer sk-1", True),
        ("Bearer sk-1", "BEARER   sk-1 ", True),
        ("Bearer sk-1", "Token sk-1", True),
        ("Bearer sk-1", "sk-1", True),
        ("sk-1", "Bearer sk-1", True),
        ("Bearer sk-1", "Bearer sk-10", False),
        ("Bearer sk-1", "Bearer", False),
        ("Bearer sk-1", "", False),
    ],
)
def test_no_spelling_of_a_credential_escapes_a_kill_switch(value: str, sent: str, expected: bool) -> None:  # of a table
    """Servers ignore the case of a scheme, and spaces behind it."""
    text = json.dumps(bundle(GUARDED, kill_switches=[switch("header:authorization", value)])).encode()

    found = Engine(parse({"b.json": text}, NOW), NOW).find_switch(
        HttpRequest("GET", "/guarded", "api", {"authorization": sent.encode()}), NOW.timestamp()
    )

    assert (found is not None) is expected


def test_a_cookie_header_has_no_scheme() -> None:
    """All of its cookies identify the caller, not only those behind the first space."""
    (cookie,) = compile_descriptors(["header:cookie"])
    values = [b"session=ann; theme=dark", b"session=bob; theme=dark"]

    read = [cookie.read(HttpRequest("GET", "/", "api", {"cookie": value}), cookie.argument) for value in values]

    assert read[0] != read[1]
