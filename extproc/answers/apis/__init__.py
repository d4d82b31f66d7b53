"""How each API answers, one file each: a new one adds its file, and its lines to the tables below."""

from __future__ import annotations

import re

from extproc.answers.apis import anthropic, bedrock, gemini, openai, rpc
from extproc.answers.apis.api import Api, Question
from extproc.request import HttpRequest

_PATHS: tuple[tuple[re.Pattern[str], Api], ...] = (
    (re.compile(r"/v1/messages(?:/|\Z)|/publishers/anthropic/models/[^/]+\Z"), anthropic.MESSAGES),
    (re.compile(r":(?:generateContent|streamGenerateContent|countTokens|(?:batchE|e)mbedContents?)\Z"), gemini.CONTENT),
    (re.compile(r"/model/[^/]+/(?:converse|converse-stream)\Z"), bedrock.CONVERSE),
    (re.compile(r"/model/[^/]+/(?:invoke|invoke-with-response-stream|count-tokens)\Z"), bedrock.INVOKE),
)
"""The first that a path matches says which API is called. Each takes time in proportion to the path, whatever that is."""

_HEADERS = (("anthropic-version", anthropic.MESSAGES),)
"""Where the path says nothing: headers that clients of one API alone send."""

_KEYS = (("jsonrpc", rpc.JSON_RPC), ("contents", gemini.CONTENT))
"""Where the headers say nothing either: keys of bodies."""

_GRPC = re.compile(rb"application/grpc(?:[+;]|\Z)")


def find_api(request: HttpRequest, question: Question) -> Api:
    """The API that a request calls; the one of OpenAI, which many understand, where that cannot be told."""
    if _GRPC.match(request.headers.get("content-type", b"")):
        return rpc.GRPC  # by the content type alone, as Envoy decides it for its own answers
    for pattern, api in _PATHS:
        if pattern.search(request.path):
            return api
    for name, api in _HEADERS:
        if name in request.headers:
            return api
    for key, api in _KEYS:
        if bytes(getattr(question, key)):
            return api
    return openai.PLAIN
