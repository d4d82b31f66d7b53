"""The Envoy that the first line of a printed configuration names is the oldest that accepts it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.budget_policies import bucket, limited
from tests.support.documents import bundle
from tests.support.envoy_config import CERTIFICATE, DOCUMENTS, bootstrap, verdict
from tests.support.harness import envoy_version

LIMITS = {"max_cost_per_session": 1, "unknown_model": {"input": 1, "output": 1}}
COSTS = bundle({"id": "c", "spec": {"selector": {"pathPrefix": "/v1/"}, "limit_keys": ["jwt:sub"], "session_limits": LIMITS}})
POLICIES = {"sample": DOCUMENTS["sample"], "costs": COSTS, "budgets": bundle(limited(bucket()))}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "tolerant": {"body_mode": "tolerant"},
    "duplex": {"body_mode": "duplex"},
    "partial": {"shadow_mode": "partial"},
    "observability": {"shadow_mode": "observability"},
    "estimated": {"usage": "estimated"},
    "spans": {"otlp": "127.0.0.1:4317"},
    "TLS by port": {"upstream": "api.example.com:443"},
}


@pytest.mark.parametrize("document", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_named_envoy_and_no_older_one_accepts_it(document: object, options: dict[str, Any], tmp_path: Path) -> None:
    """On each Envoy that the tests run on."""
    (tmp_path / "ca.pem").write_text(CERTIFICATE)
    files = {"upstream_ca": str(tmp_path / "ca.pem")} if "upstream" in options else {}
    text = bootstrap(document, **options, **files)
    named = re.search(r"for Envoy (\d+)\.(\d+) and newer", text)
    assert named

    accepted = verdict(text, tmp_path).endswith("OK\n")

    assert accepted == (envoy_version() >= (int(named[1]), int(named[2])))
