"""Checks of bodies by the SDKs' own types."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from pydantic import TypeAdapter


@cache
def _adapt(kind: Any) -> TypeAdapter[Any]:  # noqa: ANN401  # any type
    return TypeAdapter(kind)


def validate_chat(body: Mapping[str, Any]) -> None:
    from openai.types.chat import ChatCompletionContentPartTextParam, ChatCompletionMessageParam

    _adapt(list[ChatCompletionMessageParam]).validate_python(body["messages"])
    # The parts are an Iterable, which nothing validates before it is read
    content = body["messages"][2]["content"]
    _adapt(str | list[ChatCompletionContentPartTextParam]).validate_python(content)


def validate_responses(body: Mapping[str, Any]) -> None:
    from openai.types.responses import ResponseInputParam

    _adapt(ResponseInputParam).validate_python(body["input"])


def validate_anthropic(body: Mapping[str, Any]) -> None:
    from anthropic.types import ImageBlockParam, MessageParam, TextBlockParam, ToolResultBlockParam

    _adapt(list[MessageParam]).validate_python(body["messages"])
    result = body["messages"][2]["content"][0]
    _adapt(ToolResultBlockParam).validate_python(result)
    # The blocks are an Iterable, which nothing validates before it is read
    content = result.get("content", "")
    _adapt(str | list[TextBlockParam | ImageBlockParam]).validate_python(content)


def validate_gemini(body: Mapping[str, Any]) -> None:
    from google.genai.types import Content

    _adapt(list[Content]).validate_python(body["contents"])


@cache
def _load_converse() -> Any:  # noqa: ANN401  # botocore has no types
    from botocore.session import get_session

    return (
        get_session().get_service_model("bedrock-runtime").operation_model("Converse").input_shape
    )


def validate_bedrock(body: Mapping[str, Any]) -> None:
    from botocore.validate import ParamValidator

    shape = _load_converse()
    report = ParamValidator().validate({"modelId": "m", **body}, shape)
    assert not report.has_errors(), report.generate_report()


VALIDATORS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "chat": validate_chat,
    "responses": validate_responses,
    "anthropic": validate_anthropic,
    "gemini": validate_gemini,
    "bedrock": validate_bedrock,
}
