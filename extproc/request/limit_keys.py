"""Limit keys: the keys of a bundle that identify a policy's callers."""
# interpreted: pydantic reads its types at run time

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Discriminator, Field, Tag

from extproc.objects import JsonObject, is_pointer, make_error
from extproc.request.secrets import CREDENTIAL

HEADER = "header"
IP_ADDRESS = "ip:address"
# Keys that Fairvisor can derive and Loopguard cannot; reported as not enforced.
UNSUPPORTED_KEYS = frozenset(
    {"ip:country", "ip:asn", "ip:type", "ip:tor", "ua:bot", "ua:bot_category"}
)

BODY = "body"

VENDOR_SESSION = f"{HEADER}:x-*-session-id"
"""The only limit key that matches the session header of any vendor."""

_KEY = re.compile(r"(?:jwt|header|query):[A-Za-z0-9_-]+\Z")
_SCOPE_KEY = re.compile(r"(?:jwt|header|query|ip|ua):[A-Za-z0-9_-]+\Z")

FIRST_OF: Final = "first_of"

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}\Z")

_KEY_IN_HEAD = (
    "credential|(jwt|query|[Hh][Ee][Aa][Dd][Ee][Rr]):[A-Za-z0-9_-]+"
    "|ip:(address|country|asn|type|tor)|ua:(bot|bot_category)"
)
_KEY_PATTERN: dict[str, Any] = {"pattern": f"^({_KEY_IN_HEAD}|body:(/([^~/]|~[01])*)+)$"}
_HEAD_KEY_PATTERN: dict[str, Any] = {"pattern": f"^({_KEY_IN_HEAD})$"}
_SESSION_KEY_PATTERN: dict[str, Any] = {
    "pattern": f"^({_KEY_IN_HEAD}|{VENDOR_SESSION.replace('*', '[*]')}|body:(/([^~/]|~[01])*)+)$"
}


def check_limit_key(value: str) -> str:
    """Check a limit key; returns it with header names in lower case.

    Raises:
        ValueError: it is invalid; the message says what is expected.
    """
    source, _, name = value.partition(":")
    if source.lower() == HEADER:
        value = (
            f"{HEADER}:{name.lower()}"  # header names are case-insensitive (RFC 9110 section 5.1)
        )
    if source == BODY:
        if not is_pointer(name):
            raise make_error(
                "must be 'body:' and a JSON Pointer, such as 'body:/model' or "
                "'body:/metadata/session_id'"
            )
        return value
    if (
        value not in (IP_ADDRESS, CREDENTIAL)
        and value not in UNSUPPORTED_KEYS
        and not _KEY.match(value)
    ):
        raise make_error(
            "must be 'jwt:<claim>', 'header:<name>', 'query:<name>' (names of letters, digits, "
            "'_' and '-'), 'ip:address', "
            "'credential' or 'body:/<JSON Pointer>'"
        )
    return value


def _check_session_key(value: str) -> str:
    return value if value == VENDOR_SESSION else check_limit_key(value)


def _check_scope_key(value: str) -> str:
    if not _SCOPE_KEY.match(value):
        raise make_error(
            "must be 'jwt:<claim>', 'header:<name>', 'query:<name>' (names of letters, digits, "
            "'_' and '-') or 'ip:address'"
        )
    source, _, name = value.partition(":")
    return f"{source}:{name.lower()}" if source == HEADER else value


def is_in_body(limit_key: object) -> bool:
    """Whether a limit key's value is in the body."""
    return isinstance(limit_key, str) and limit_key.startswith(f"{BODY}:")


def _check_in_head(value: str) -> str:
    if is_in_body(value):
        raise make_error("must not be in the body", ": callers are chosen before the body arrives")
    return value


def _check_agent_key(value: str) -> str:
    if is_in_body(value):
        raise make_error("must not be in the body", ": agents are named outside of it")
    return value


def _check_name(value: str) -> str:
    if not _NAME.match(value) or value == CREDENTIAL:
        raise make_error(
            "must be a letter, then letters, digits, '_' and '-', up to 64, such as 'caller'"
        )
    return value


LimitKey = Annotated[str, AfterValidator(check_limit_key), Field(json_schema_extra=_KEY_PATTERN)]
SessionKey = Annotated[
    str, AfterValidator(_check_session_key), Field(json_schema_extra=_SESSION_KEY_PATTERN)
]
ScopeKey = Annotated[
    str,
    AfterValidator(_check_scope_key),
    Field(json_schema_extra={"pattern": "^(jwt|header|query|ip|ua):[A-Za-z0-9_-]+$"}),
]
HeadKey = Annotated[
    str,
    AfterValidator(check_limit_key),
    AfterValidator(_check_in_head),
    Field(json_schema_extra=_HEAD_KEY_PATTERN),
]

AgentKey = Annotated[
    str,
    AfterValidator(check_limit_key),
    AfterValidator(_check_agent_key),
    Field(json_schema_extra=_HEAD_KEY_PATTERN),
]


class FirstOf(JsonObject):
    """The first of several limit keys that a request has.

    Attributes:
        first_of: limit keys outside the body, those that clients cannot choose first. Claims are
            tried before credentials.
        name: the value's name. The value begins with its limit key.
    """

    first_of: Annotated[list[HeadKey], Field(min_length=1)]
    name: Annotated[
        str,
        AfterValidator(_check_name),
        Field(json_schema_extra={"pattern": "^[A-Za-z][A-Za-z0-9_-]{0,63}$"}),
    ]

    def __hash__(self) -> int:
        """Hash the fields that equality compares."""
        return hash((self.name, *self.first_of))


KEY_TAG, OBJECT_TAG = "(key)", "(first_of)"
"""Tags that pydantic adds to places of errors below lists of limit keys; removed again."""

_is_object = Discriminator(
    lambda value: OBJECT_TAG if isinstance(value, dict | FirstOf) else KEY_TAG
)
CallerKey = Annotated[
    Annotated[LimitKey, Tag(KEY_TAG)] | Annotated[FirstOf, Tag(OBJECT_TAG)], _is_object
]
HeadCallerKey = Annotated[
    Annotated[HeadKey, Tag(KEY_TAG)] | Annotated[FirstOf, Tag(OBJECT_TAG)], _is_object
]


def list_sources(limit_keys: Iterable[str | FirstOf]) -> list[str]:
    """All limit keys, including the alternatives of each `first_of`."""
    return [
        source
        for key in limit_keys
        for source in (key.first_of if isinstance(key, FirstOf) else [key])
    ]
