"""Where requests contain secrets, such as API keys. Outside a request, only keyed hashes of these exist."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final

CREDENTIAL: Final = "credential"
"""The limit key for the secret of a request, wherever it is."""

SECRET_PARAMETER: Final = "key"  # noqa: S105  # the parameter's name, not a secret
"""A query parameter."""

ANYWHERE: Final[list[str]] = []
"""Limit keys for the places of secrets of any API, in the order in which they are tried; `apis` fills it."""

SECRET_HEADERS: Final = {"authorization", "proxy-authorization", "cookie"}
"""Headers whose values must not be kept outside a request; `apis` adds its own."""

OWN_PLACES: Final[list[tuple[Callable[[str], object], tuple[str, ...]]]] = []
"""Functions that recognize an API by its path, and limit keys for the places of its secrets; `apis` fills it."""

_LONGEST_KNOWN: Final = 256
_MAX_KNOWN: Final = 1_024
"""Maximum length of a path, in characters, and number of paths whose places are remembered."""

_ACCESS_KEY = re.compile(r"Credential=([^/,\s]+)")
_SCHEMES = frozenset({"bearer", "basic"})


def is_secret(limit_key: str) -> bool:
    """Whether the value of a limit key is a secret, which is compared only by its hash."""
    source, _, name = limit_key.partition(":")
    if source == "header":
        return name in SECRET_HEADERS
    return limit_key == CREDENTIAL or (source == "query" and name == SECRET_PARAMETER)


def may_stand_in_query(limit_key: str) -> bool:
    """Whether the query may contain the secret that a limit key names."""
    return limit_key in (CREDENTIAL, f"query:{SECRET_PARAMETER}")


def list_places(path: str) -> tuple[str, ...]:
    """The places where a request may have its credential, as limit keys in the order in which they are tried."""
    return _recall_places(path) if len(path) <= _LONGEST_KNOWN else _list_places(path)


def _list_places(path: str) -> tuple[str, ...]:
    for search, places in OWN_PLACES:
        if search(path):
            return tuple(dict.fromkeys([*places, *ANYWHERE]))
    return tuple(ANYWHERE)


_recall_places: Final = lru_cache(_MAX_KNOWN)(_list_places)


def extract_secret(value: str, header: str = "authorization") -> str:
    """The secret in a header's value: everything but the scheme (RFC 9110 section 11.4); empty if there is nothing else.

    For AWS signatures, which change with every request, it is the access key id (Signature Version 4, `Credential=`).

    >>> extract_secret("Bearer sk-1")
    'sk-1'
    >>> extract_secret("AWS4-HMAC-SHA256 Credential=AKIA1/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, ...")
    'AKIA1'
    """
    if header == "cookie":  # which has no scheme
        return value.strip()
    scheme, _, rest = value.strip().partition(" ")
    if scheme[:5].upper() == "AWS4-" and (found := _ACCESS_KEY.search(rest)) is not None:
        return found[1]
    rest = rest.strip()
    if rest:
        return rest
    return "" if scheme.lower() in _SCHEMES else scheme
