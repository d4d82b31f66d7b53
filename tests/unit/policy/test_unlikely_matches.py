"""Selectors that match no request are warned of, and keys for editors are ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # published without type information
import pytest

from extproc.cli.main import main
from extproc.policy.bundle import make_schema
from extproc.policy.loader import parse
from tests.support.bundles import NOW
from tests.support.documents import bundle, policy

ANY = "leave methods out to match any"


def warnings(selector: dict[str, Any], **spec: Any) -> list[tuple[str, str]]:  # noqa: ANN401  # any field of a spec
    """Place and text of each warning about a policy."""
    made = policy("a", {"pathPrefix": "/", **selector}, limit_keys=["jwt:org"])
    made["spec"].update(spec)
    return [(found.pointer, found.message) for found in parse({"p.json": json.dumps(made).encode()}, NOW).warnings]


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("*", ANY),
        ("any", ANY),
        ("ALL", ANY),
        ("POSTT", "did you mean POST?"),
        ("psot", "did you mean POST?"),
        ("GET|POST", "no HTTP method known"),
        ("FROB", "no HTTP method known"),
    ],
)
def test_unknown_methods_are_warned_of(method: str, told: str) -> None:
    """A placeholder, a typo, a pattern, and an unknown word."""
    [(place, text)] = warnings({"methods": ["GET", method]})

    assert place == "/spec/selector/methods/1"
    assert told in text


@pytest.mark.parametrize("method", ["post", "QUERY", "PROPFIND", "PURGE", "M-SEARCH", "CONNECT"])
def test_known_methods_are_not_warned_of(method: str) -> None:
    """Registered methods, in any case, and others in use."""
    assert warnings({"methods": [method]}) == []


def test_bypass_matches_are_checked_as_selectors_are() -> None:
    """A bypass that matches nothing is warned of, too."""
    found = warnings({}, bypass=[{"methods": ["ANY"]}, {"pathPrefix": "/health*"}])

    assert [place for place, _ in found] == ["/spec/bypass/0/methods/0", "/spec/bypass/1/pathPrefix"]


def test_a_wildcard_is_no_route() -> None:
    """Names of routes that contain a `*` are real: Envoy Gateway writes them."""
    [(place, text)] = warnings({"routes": ["*", "httproute/a/b/rule/0/match/0/*"]})

    assert (place, text) == ("/spec/selector/routes/0", "'*' is matched literally; leave routes out to match any")


def test_an_exact_path_of_another_api_is_warned_of() -> None:
    """No request matches both keys."""
    [(place, text)] = warnings({"apis": ["anthropic"], "pathExact": "/v1/responses"})

    assert (place, text.partition(",")[0]) == ("/spec/selector/pathExact", "is no path of these apis")
    assert warnings({"apis": "any", "pathExact": "/v1/responses"}) == []


@pytest.mark.parametrize("document", [policy("a", {"pathPrefix": "/"}), bundle(policy("a", {"pathPrefix": "/"}))])
def test_documents_may_name_their_schema(document: dict[str, Any]) -> None:
    """`$schema` is ignored, and valid by our own schema."""
    named = {"$schema": "./loopguard.schema.json", **document}

    assert len(parse({"p.json": json.dumps(named).encode()}, NOW).list_acting()) == 1
    jsonschema.Draft202012Validator(make_schema()).validate(named)


def test_a_schema_among_policies_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file to which `$schema` refers may be in the folder."""
    (tmp_path / "loopguard.schema.json").write_text(json.dumps(make_schema()))
    (tmp_path / "a.json").write_text(json.dumps({"$schema": "./loopguard.schema.json", **policy("a", {"pathPrefix": "/"})}))

    code = main(["validate", str(tmp_path)])
    printed = capsys.readouterr()

    assert (code, printed.out) == (0, "good: 1 policy in 2 files\n")
    assert f"note: {tmp_path / 'loopguard.schema.json'}: /: is a JSON Schema, so it has no policies" in printed.err


def test_no_policy_may_pose_as_a_schema() -> None:
    """A policy stays one, whatever its `$schema` says."""
    made = {"$schema": "https://json-schema.org/draft/2020-12/schema", **policy("a", {"pathPrefix": "/"})}

    assert len(parse({"p.json": json.dumps(made).encode()}, NOW).list_acting()) == 1
