"""Limit keys: what tells the callers of a policy apart, as a bundle names it."""
# interpreted: pydantic reads its types at run time, once

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from extproc.objects import is_pointer, make_error

HEADER = "header"
IP_ADDRESS = "ip:address"
# What Fairvisor can derive and Loopguard cannot: reported like every other part that is not enforced.
UNSUPPORTED_KEYS = frozenset({"ip:country", "ip:asn", "ip:type", "ip:tor", "ua:bot", "ua:bot_category"})

BODY = "body"

VENDOR_SESSION = f"{HEADER}:x-*-session-id"
"""Any header by which some vendor names a session, for which there is one such key."""

_KEY = re.compile(r"(?:jwt|header|query):[A-Za-z0-9_-]+\Z")
_SCOPE_KEY = re.compile(r"(?:jwt|header|query|ip|ua):[A-Za-z0-9_-]+\Z")

_KEY_IN_HEAD = "(jwt|query|[Hh][Ee][Aa][Dd][Ee][Rr]):[A-Za-z0-9_-]+|ip:(address|country|asn|type|tor)|ua:(bot|bot_category)"
_KEY_PATTERN: dict[str, Any] = {"pattern": f"^({_KEY_IN_HEAD}|body:(/([^~/]|~[01])*)+)$"}
_HEAD_KEY_PATTERN: dict[str, Any] = {"pattern": f"^({_KEY_IN_HEAD})$"}
_SESSION_KEY_PATTERN: dict[str, Any] = {
    "pattern": f"^({_KEY_IN_HEAD}|{VENDOR_SESSION.replace('*', '[*]')}|body:(/([^~/]|~[01])*)+)$"
}


def check_limit_key(value: str) -> str:
    """A limit key as it is compared: the names of headers in lower case.

    Raises:
        ValueError: it is none; what would be right.
    """
    source, _, name = value.partition(":")
    if source.lower() == HEADER:
        value = f"{HEADER}:{name.lower()}"  # header names are case-insensitive (RFC 9110 section 5.1)
    if source == BODY:
        if not is_pointer(name):
            raise make_error("must be 'body:' and a JSON Pointer, such as 'body:/model' or 'body:/metadata/session_id'")
        return value
    if value != IP_ADDRESS and value not in UNSUPPORTED_KEYS and not _KEY.match(value):
        raise make_error(
            "must be 'jwt:<claim>', 'header:<name>', 'query:<name>' (names of letters, digits, '_' and '-'), 'ip:address' "
            "or 'body:/<JSON Pointer>'"
        )
    return value


def _check_session_key(value: str) -> str:
    return value if value == VENDOR_SESSION else check_limit_key(value)


def _check_scope_key(value: str) -> str:
    if not _SCOPE_KEY.match(value):
        raise make_error(
            "must be 'jwt:<claim>', 'header:<name>', 'query:<name>' (names of letters, digits, '_' and '-') or 'ip:address'"
        )
    source, _, name = value.partition(":")
    return f"{source}:{name.lower()}" if source == HEADER else value


def is_in_body(limit_key: str) -> bool:
    """Whether its value is not known before the body is."""
    return limit_key.startswith(f"{BODY}:")


def _check_in_head(value: str) -> str:
    if is_in_body(value):
        raise make_error("must not be in the body", ": callers are chosen before the body arrives")
    return value


LimitKey = Annotated[str, AfterValidator(check_limit_key), Field(json_schema_extra=_KEY_PATTERN)]
SessionKey = Annotated[str, AfterValidator(_check_session_key), Field(json_schema_extra=_SESSION_KEY_PATTERN)]
ScopeKey = Annotated[
    str, AfterValidator(_check_scope_key), Field(json_schema_extra={"pattern": "^(jwt|header|query|ip|ua):[A-Za-z0-9_-]+$"})
]
HeadKey = Annotated[
    str, AfterValidator(check_limit_key), AfterValidator(_check_in_head), Field(json_schema_extra=_HEAD_KEY_PATTERN)
]
