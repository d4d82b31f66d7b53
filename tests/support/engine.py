import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from extproc.engine.engine import Engine
from extproc.engine.guards import Guard
from extproc.policy.loader import parse
from extproc.request.http import HttpRequest
from extproc.store.rules.windows import Count
from tests.support.documents import bundle

NOW = datetime(2030, 1, 1, tzinfo=UTC)


ANY = {"pathPrefix": "/"}


def make_engine(
    *policies: Mapping[str, Any], now: datetime = NOW, shadow: bool = False, **more: object
) -> Engine:
    return Engine(
        parse({"bundle.json": json.dumps(bundle(*policies, **more)).encode()}, NOW),
        now,
        shadow=shadow,
    )


def keys(candidates: list[Guard]) -> list[str]:
    return [candidate.hit.key for candidate in candidates if candidate.hit is not None]


def get(target: str = "/", **headers: str) -> HttpRequest:
    """A GET request; `x_a` becomes the header `x-a`."""
    return HttpRequest(
        "GET",
        target,
        "host",
        {name.replace("_", "-"): value.encode() for name, value in headers.items()},
    )


LOOP = Count(3, looping=True, cooldown_ms=0, span_ms=1_000)
