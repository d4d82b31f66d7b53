"""Which model a request asks, for all who have to know: refusals, prices, loops and sessions.

Where an API names the model in the path, that is the model which answers, whatever else stands in the body: Bedrock, Google's
APIs, Azure's deployments. All others name it in the body. Names come as SDKs write them, so that `%3A` is a colon.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote

LONGEST_MODEL: Final = 256
"""Of a name, in characters."""

_LONGEST_ENCODED: Final = 9 * LONGEST_MODEL
"""Before it is decoded: a character takes nine, where it is three bytes of UTF-8."""

_BEDROCK: Final = frozenset(
    {"converse", "converse-stream", "invoke", "invoke-with-response-stream", "invoke-with-bidirectional-stream", "count-tokens"}
)
"""What follows `/model/ID/`."""

_COLLECTIONS: Final = ("/models", "/tunedModels", "/endpoints")
"""Of Google's APIs: their names come last, and a method after a colon."""

_NO_NAMES: Final = frozenset({"count-tokens"})
"""What Anthropic's SDK for Vertex AI puts in place of a name, which stands in the body then."""

_DEPLOYMENTS: Final = ("/deployments/", "/engines/")
"""Of Azure, and of OpenAI before it had its chats."""

_ANYWHERE: Final = ("/models/", "/model/")


def find_model(path: str, named: str = "") -> str:
    """The model that a request asks, empty where it does not say.

    Args:
        path: of the request.
        named: in its body, empty where it names none there, or where nobody could look.
    """
    return _find_in_path(path) or named[:LONGEST_MODEL] or _find_behind(path, _ANYWHERE)


def _find_in_path(path: str) -> str:
    """The name in a path of an API that has it there."""
    before, _, last = path.rpartition("/")
    if last in _BEDROCK:
        return _decode(before.partition("/model/")[2])  # whole: an ARN has a slash, which a proxy may have decoded
    if ":" in last and before.endswith(_COLLECTIONS):
        name = last.rpartition(":")[0]
        return "" if name in _NO_NAMES else _decode(name)
    return _find_behind(path, _DEPLOYMENTS)


def _find_behind(path: str, collections: tuple[str, str]) -> str:
    """The name that follows one of these words."""
    for collection in collections:
        if collection in path:
            return _decode(path.partition(collection)[2].partition("/")[0].partition(":")[0])
    return ""


def _decode(name: str) -> str:
    return unquote(name[:_LONGEST_ENCODED])[:LONGEST_MODEL]
