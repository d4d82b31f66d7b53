"""How each API answers, one file each: a new one adds its file, and its lines to the tables below."""
# interpreted: writes refusals, which is json's time; msgspec makes its Structs of annotations

from __future__ import annotations

import re

from extproc.apis.answers import anthropic, bedrock, gemini, ollama, openai, responses, rpc
from extproc.apis.answers.api import Api, Question

_PATHS: tuple[tuple[str, Api], ...] = (
    (r"/chat/completions\Z", openai.CHAT),
    (r"/completions\Z", openai.TEXT),
    (r"/responses\Z", responses.RESPONSES),
    (r"/v1/messages\Z", anthropic.MESSAGES),
    (r"/v1/messages/", anthropic.OTHERS),
    (r"/publishers/anthropic/models/[^/:]+:(?:rawPredict|streamRawPredict)\Z", anthropic.MESSAGES),
    (r":generateContent\Z", gemini.CONTENT),
    (r":streamGenerateContent\Z", gemini.STREAM),
    (r":(?:countTokens|embedContent|batchEmbedContents)\Z", gemini.OTHERS),
    (r"\A(?>.*?/model/).+/converse\Z", bedrock.CONVERSE),
    (r"\A(?>.*?/model/).+/converse-stream\Z", bedrock.CONVERSE_STREAM),
    (r"\A(?>.*?/model/).+/invoke\Z", bedrock.INVOKE),
    (r"\A(?>.*?/model/).+/invoke-with-response-stream\Z", bedrock.INVOKE_STREAM),
    (r"\A(?>.*?/model/).+/count-tokens\Z", bedrock.OTHERS),
    (r"/api/chat\Z", ollama.CHAT),
    (r"/api/generate\Z", ollama.TEXT),
)
"""The first that a path matches says which API is called. Each takes time in proportion to the path, whatever that is."""

_SEARCHES = [(re.compile(pattern).search, api) for pattern, api in _PATHS]

_HEADERS = (("anthropic-version", anthropic.MESSAGES), ("mcp-protocol-version", rpc.JSON_RPC))
"""Where the path says nothing: headers that clients of one API alone send."""

_KEYS = (
    (("jsonrpc",), rpc.JSON_RPC),
    (("contents",), gemini.OTHERS),  # whose path alone would say whether a stream is wanted
    (("messages", "model"), openai.CHAT),
)
"""Where the headers say nothing either: what bodies have."""

_GRPC = re.compile(rb"application/grpc(?:[+;]|\Z)", re.IGNORECASE)


def find_api(question: Question) -> Api:
    """The API that a request calls; the one of OpenAI, which many understand, where that cannot be told."""
    request = question.request
    if _GRPC.match(request.headers.get("content-type", b"")):
        return rpc.GRPC  # by the content type alone, as Envoy does for its own answers
    for search, api in _SEARCHES:
        if search(request.path):
            return api
    for name, api in _HEADERS:
        if name in request.headers:
            return api
    for keys, api in _KEYS:
        if question.has(*keys):
            return api
    return openai.PLAIN
