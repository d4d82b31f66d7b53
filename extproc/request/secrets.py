"""Which parts of a request are secrets, such as API keys.

Outside a request, only keyed hashes of them exist.

Gateways and SDKs invent names for credentials, so no list of names is complete. A header or
parameter is a secret if one of the words in its name is, or ends in, key, token, secret, auth,
cookie, password, credential or the like. Hashing too much does no harm, so doubtful names are
secrets. So are the places that APIs define, whatever their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set as AbstractSet
from typing import Final

CREDENTIAL: Final = "credential"
"""The limit key for the secret of a request, wherever it is."""

ANYWHERE: Final[list[str]] = []
"""Limit keys of the places of secrets in any API, in the order in which they are tried; filled by
`apis`."""

OWN_PLACES: Final[list[tuple[Callable[[str], object], list[str]]]] = []
"""Functions that recognize an API by its path, each with limit keys of its secrets' places; filled
by `apis`."""

_ACCESS_KEY = re.compile(r"Credential=([^/,\s]+)")
_SCHEMES = frozenset({"bearer", "basic"})

_HUMP = re.compile("(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SAYS_SECRET = re.compile(
    r"""
    auth (?! or(?!i[sz]) | entic(?!at) )  # oauth2, authorization; not author, authority
    | (?<! mon | don | tur | hoc | joc ) (?<! whis | port ) key (?: s | id )? (?![a-z])  # a vendor
    | api_?key
    | token (?: id )? (?! [a-z] | _?(?: count | estimate | limit | budget | usage ) )  # counts
    | (?: access | api | refresh | session | user ) _? tokens (?![a-z])
    | secret (?! ar | i[ov] )  # not secretary
    | cookies? (?![a-z])
    | credential | passw(?:or)?d | passphrase
    | (?<![a-z]) (?: bearer | jwt | pwd | sig | signature ) (?![a-z])
    """,
    re.VERBOSE,
)


_HINT = re.compile("auth|key|token|secret|cookie|credential|pass|bearer|jwt|pwd|sig")
"""Every such name contains one of these."""


def find_secrets(names: AbstractSet[str]) -> set[str]:
    """The names in a query that say they are secrets.

    Few queries have any, but a client may send thousands of names.
    """
    if _HINT.search(" ".join(names).lower()) is None:
        return set()
    return {name for name in names if says_secret(name)}


def says_secret(name: str) -> bool:
    """Whether the name of a header or parameter says that its value is a secret.

    >>> [says_secret(name) for name in ("x-team-key", "accessToken", "APIKEY", "x-author",
        "max_tokens", "monkey")]
    [True, True, True, False, False, False]
    """
    if not (name.islower() or name.isupper()):
        name = _HUMP.sub("_", name)
    return _SAYS_SECRET.search(name.lower().replace("-", "_")) is not None


def is_secret(limit_key: str) -> bool:
    """Whether the value of a limit key is a secret, to be compared only by its hash."""
    source, _, name = limit_key.partition(":")
    if source in {"header", "query"}:
        return says_secret(name) or limit_key in ANYWHERE
    return limit_key == CREDENTIAL or (source == "body" and says_secret(name.rpartition("/")[2]))


def may_stand_in_query(limit_key: str) -> bool:
    """Whether the query may contain the secret that a limit key names."""
    return limit_key == CREDENTIAL or (limit_key.startswith("query:") and is_secret(limit_key))


def list_places(path: str) -> list[str]:
    """Where a request may have its credential, as limit keys in the order they are tried."""
    for search, places in OWN_PLACES:
        if search(path):
            return places
    return ANYWHERE


def extract_secret(value: str, header: str = "authorization") -> str:
    """The secret in a header: all but the scheme (RFC 9110 section 11.4); empty if nothing is left.

    Only headers for authorization have schemes, but some clients send the usual ones in any header.
    For AWS signatures, which change with every request, it is the access key id (Signature Version
    4, `Credential=`).

    >>> extract_secret("Bearer sk-1")
    'sk-1'
    >>> extract_secret("AWS4-HMAC-SHA256 Credential=AKIA1/20260101/us-east-1/s3/aws4_request,
        SignedHeaders=host, ...")
    'AKIA1'
    """
    scheme, _, rest = value.strip().partition(" ")
    if "auth" not in header and scheme.lower() not in _SCHEMES:
        return value.strip()
    if scheme[:5].upper() == "AWS4-" and (found := _ACCESS_KEY.search(rest)) is not None:
        return found[1]
    rest = rest.strip()
    if rest:
        return rest
    return "" if scheme.lower() in _SCHEMES else scheme
