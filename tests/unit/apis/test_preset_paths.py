"""The preset for agents guards the paths on which clients call the APIs, and no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from extproc.apis import APIS
from extproc.policy.presets import find_preset
from extproc.request.http import HttpRequest
from tests.support.engine import make_engine

AGENTS = json.loads(Path(find_preset("agents")).read_text())


def test_the_preset_has_the_paths_of_every_api() -> None:
    """Each API's file names its own: a new API has to stand in the preset, too."""
    prefixes = [prefix for api in APIS for prefix in api.prefixes]

    assert all(api.prefixes for api in APIS if api.paths)
    assert sorted(AGENTS["spec"]["selector"]["pathPrefixes"]) == sorted(set(prefixes))
    assert len(prefixes) == len(set(prefixes))


@pytest.mark.parametrize(
    ("path", "guarded"),
    [
        ("/v1/chat/completions", True),
        ("/v1/responses", True),
        ("/v1/messages", True),
        ("/v1beta/models/gemini-2.5-pro:streamGenerateContent", True),
        ("/v1/models/gemini-2.5-pro:generateContent", True),
        ("/v1internal:generateContent", True),
        ("/v1/projects/p/locations/l/publishers/anthropic/models/m:rawPredict", True),
        ("/model/us.anthropic.claude-sonnet-4/converse-stream", True),
        ("/api/chat", True),
        ("/api/v1/chat/completions", True),
        ("/openai/deployments/gpt-4o/chat/completions", True),
        ("/chat/completions", True),
        ("/v1/embeddings", False),
        ("/v1/files", False),
        ("/v1/chatter", False),
        ("/api/tags", False),
        ("/api/orders", False),
        ("/models", False),
    ],
)
def test_what_clients_call(path: str, guarded: bool) -> None:  # of a table
    """Real clients' paths are guarded; those of other programs, and calls that no conversation stands in, are not."""
    engine = make_engine(AGENTS)

    assert bool(engine.match(HttpRequest("POST", path))) is guarded
    assert not engine.match(HttpRequest("GET", path))
