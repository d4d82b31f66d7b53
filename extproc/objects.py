"""Base model and field types of the JSON objects of a bundle."""
# interpreted: runs at start and reload; pydantic needs the annotations, which compiled classes do
# not keep

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

Place = tuple[str | int, ...]
"""The steps from a document down to one of its values."""

MAX_SECONDS = 31_536_000
"""Maximum window or cooldown: a year."""

MAX_THRESHOLD = 1_000_000_000

INSPECT_BYTES: Final = 2**20
InspectBytes = Annotated[int, Field(ge=1, le=16 * 2**20)]
AUTO: Final = "auto"
_STATUSES = (400, 599)
# RFC 6901, without the empty pointer to the whole document
_POINTER = re.compile(r"(?:/(?:[^~/]|~[01])*)+\Z")


def make_error(message: str, why: str = "") -> PydanticCustomError:
    """Make a validator's error: what would be valid, and a text to append after the value found."""
    return PydanticCustomError("loopguard", "{message}", {"message": message, "why": why})


def copy_text(text: str) -> str:
    """Copy a text out of a document, so that the document can be freed."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")


def is_pointer(value: str) -> bool:
    """Whether a text is a JSON Pointer (RFC 6901) and not empty."""
    return _POINTER.match(value) is not None


def is_annotation(key: str) -> bool:
    """Whether the key is allowed and ignored in any object.

    `description`, `x-...`, and `$schema` for editors.
    """
    return key in ("description", "$schema") or key.startswith("x-")


def _check_pointer(value: str) -> str:
    if not is_pointer(value):
        raise make_error(
            "must be a JSON Pointer, such as '/metadata/request_id' or '/messages/*/id'"
        )
    return value


def _check_status(value: object) -> object:
    if value == AUTO:
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        raise make_error(f"must be an integer or '{AUTO}'")
    if value < _STATUSES[0]:
        raise make_error(f"must be >= {_STATUSES[0]}")
    if value > _STATUSES[1]:
        raise make_error(f"must be <= {_STATUSES[1]}")
    return value


_STATUS: dict[str, Any] = {
    "type": ["integer", "string"],
    "minimum": _STATUSES[0],
    "maximum": _STATUSES[1],
    "pattern": f"^{AUTO}$",
}

Pointer = Annotated[
    str,
    AfterValidator(_check_pointer),
    Field(json_schema_extra={"pattern": "^(/([^~/]|~[01])*)+$"}),
]
Status = Annotated[int | Literal["auto"], BeforeValidator(_check_status), WithJsonSchema(_STATUS)]


NO_ITEMS: Any = Field(default_factory=list, json_schema_extra={"default": []})
"""Default for an empty list; copying a literal for each object takes 5 % of a load's time."""


class JsonObject(BaseModel):
    """A JSON object of a bundle: unknown keys are errors, except annotations."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        json_schema_extra={"patternProperties": {"^x-": {}, "^(description|\\$schema)$": {}}},
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_annotations(cls, value: Any) -> Any:  # noqa: ANN401  # raw JSON, before any check
        if isinstance(value, dict) and any(map(is_annotation, value)):
            return {key: item for key, item in value.items() if not is_annotation(key)}
        return value
