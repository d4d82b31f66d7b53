"""Policy documents for tests, written as briefly as a test wants to say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def policy(identity: str, selector: Mapping[str, object], *, mode: str = "enforce", **more: object) -> dict[str, Any]:
    """A policy document; `limit_keys` and `missing_descriptor` go to the spec, everything else to loop_detection."""
    spec: dict[str, Any] = {"selector": dict(selector), "mode": mode}
    for key in ("limit_keys", "missing_descriptor"):
        if key in more:
            spec[key] = more.pop(key)
    loop = {"enabled": True, "window_seconds": 60, "threshold_identical_requests": 3, **more}
    return {"id": identity, "spec": {**spec, "loop_detection": loop}}


def bundle(*policies: Mapping[str, object], **more: object) -> dict[str, Any]:
    """A bundle document."""
    return {"bundle_version": 1, "policies": list(policies), **more}
