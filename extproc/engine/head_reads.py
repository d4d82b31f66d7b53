"""What a policy reads of a request's head, which records have to contain."""

from __future__ import annotations

from typing import Final

from extproc.request.limit_keys import VENDOR_SESSION
from extproc.request.secrets import CREDENTIAL, SECRET_HEADERS

_VENDOR: Final = VENDOR_SESSION.partition(":")[2]


class HeadReads:
    """What a policy reads beside its selector; never changed.

    Attributes:
        pairs: (source, argument) as in limit keys, each once.
        headers: whose values may be kept.
        secrets: headers whose values may not.
        credential: the request's secret is read.
        vendors: headers of vendors that name sessions are read.
    """

    __slots__ = ("credential", "headers", "pairs", "secrets", "vendors")

    def __init__(self, pairs: tuple[tuple[str, str], ...]) -> None:
        self.pairs = pairs
        named = [name for source, name in pairs if source == "header" and name != "host"]
        self.headers = [name for name in named if name not in SECRET_HEADERS and name != _VENDOR]
        self.secrets = [name for name in named if name in SECRET_HEADERS]
        self.credential = any(source == CREDENTIAL for source, _ in pairs)
        self.vendors = _VENDOR in named
