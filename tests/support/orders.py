import time
from typing import Any, TypeVar

from extproc.engine.orders import ActiveOverride, Grant, Overrides, Target, hash_descriptor
from extproc.ext_proc.service import Service

T = TypeVar("T")

USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}


ANN = Target(descriptors=(("x-user-id", hash_descriptor("x-user-id", "ann")),))


def order(  # what an order says
    kind: str,
    target: Target = ANN,
    *,
    name: str = "o",
    about: str = "",
    since: float = 0,
    lasts: float = 60,
    reason: str = "",
    who: str = "",
    grant: Grant | None = None,
) -> ActiveOverride:
    """An override that began a moment ago; `since` tells several apart."""
    now = time.time()
    return ActiveOverride(
        name,
        kind,
        target,
        about,
        now - 1 + since / 1000,
        now + lasts,
        reason,
        who,
        grant or Grant(),
    )


def apply_orders(service: Service, *standing: ActiveOverride) -> Service:
    service.overrides = Overrides(standing) if standing else None
    return service
