from collections.abc import Mapping
from typing import Any

import yaml

_SPEC = (
    "limit_keys",
    "labels",
    "aliases",
    "missing_descriptor",
    "session",
    "session_limits",
    "enforce_percent",
    "ramp_by",
    "ramp_seed",
    "keep_counts",
    "canary_of",
)


def policy(
    identity: str, selector: Mapping[str, object], *, mode: str = "enforce", **more: object
) -> dict[str, Any]:
    """A policy document; keys in `_SPEC` go to the spec, all others to loop_detection."""
    spec: dict[str, Any] = {"selector": dict(selector), "mode": mode}
    for key in _SPEC:
        if key in more:
            spec[key] = more.pop(key)
    loop = {"enabled": True, "window_seconds": 60, "threshold_identical_requests": 3, **more}
    return {"id": identity, "spec": {**spec, "loop_detection": loop}}


def bare_policy(identity: str, prefix: str = "/", **spec: object) -> dict[str, Any]:
    return {"id": identity, "spec": {"selector": {"pathPrefix": prefix}, **spec}}


def bundle(*policies: Mapping[str, object], **more: object) -> dict[str, Any]:
    return {"bundle_version": 1, "policies": list(policies), **more}


def read_yaml(text: str) -> Any:  # noqa: ANN401  # whatever the document holds
    """Read YAML with libyaml, in a tenth of the time of `safe_load`."""
    return yaml.load(text, yaml.CSafeLoader)
