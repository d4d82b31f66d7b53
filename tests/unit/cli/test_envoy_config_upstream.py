"""`loopguard envoy-config` speaks TLS where the upstream does, and names the Envoy that its output needs."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from extproc.cli.envoy_config.options import EnvoyOptions
from extproc.cli.envoy_config.snippet import render_snippet
from extproc.cli.main import main
from extproc.options import read_options
from tests.support.budget_policies import bucket, limited
from tests.support.documents import bundle, policy
from tests.support.envoy_config import bootstrap, loaded

PLAIN = bundle(policy("p", {"pathPrefix": "/v1/"}, limit_keys=["header:x"]))
COSTS = bundle(
    {
        "id": "costs",
        "spec": {
            "selector": {"pathPrefix": "/v1/"},
            "limit_keys": ["header:x"],
            "session_limits": {"max_cost_per_session": 1, "unknown_model": {"input": 1, "output": 1}},
        },
    }
)


def upstream(**flags: object) -> dict[str, Any]:
    """The cluster of the upstream."""
    clusters = yaml.safe_load(bootstrap(PLAIN, **flags))["static_resources"]["clusters"]
    return next(dict(cluster) for cluster in clusters if cluster["name"] == "upstream")


@pytest.mark.parametrize(
    ("flags", "tls"),
    [
        ({"upstream": "api.example.com:443"}, True),
        ({"upstream": "192.0.2.1:443"}, True),
        ({"upstream": "api.example.com:8443", "upstream_tls": True}, True),
        ({"upstream": "api.example.com:8443"}, False),
        ({"upstream": "127.0.0.1:8080"}, False),
    ],
)
def test_port_443_means_tls(flags: dict[str, object], tls: bool) -> None:
    """With a verified certificate, as with the flag."""
    found = upstream(**flags)
    context = found.get("transport_socket", {}).get("typed_config", {}).get("common_tls_context", {})

    assert ("transport_socket" in found) == tls
    assert ("trusted_ca" in context.get("validation_context", {})) == tls


def test_a_port_that_usually_speaks_tls_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    """Envoy would speak plain HTTP to it."""
    code = main(["envoy-config", "--upstream", "api.example.com:8443"])

    assert code == 0
    assert capsys.readouterr().err == "warning: port 8443 usually speaks TLS, and Envoy will not; add --upstream-tls\n"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--otlp", "api.example.com:443"], "loopguard: --otlp must be a collector that speaks gRPC without TLS"),
        (["--upstream-ca", "/ca.pem"], "loopguard: --upstream-ca must be left out without --upstream-tls"),
    ],
)
def test_tls_that_would_not_happen_is_refused(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Rather than left out."""
    code = main(["envoy-config", "--upstream", "127.0.0.1:8080", *flags])

    assert code == 2
    assert capsys.readouterr().err.startswith(told)


@pytest.mark.parametrize(
    ("document", "flags", "version"),
    [
        (PLAIN, {}, "1.36"),
        (COSTS, {}, "1.38"),
        (COSTS, {"usage": "estimated"}, "1.36"),
        (COSTS, {"shadow_mode": "observability"}, "1.36"),
        (PLAIN, {"body_mode": "tolerant"}, "1.38"),
        (PLAIN, {"body_mode": "duplex"}, "1.38"),
        (PLAIN, {"shadow_mode": "partial"}, "1.38"),
        (PLAIN, {"tolerant_routes": "/v1/"}, "1.38"),
        (bundle(limited(bucket())), {}, "1.36"),
    ],
)
def test_the_header_names_the_envoy_that_is_needed(document: object, flags: dict[str, Any], version: str) -> None:
    """By what is printed, in a bootstrap and in a snippet."""
    snippet = render_snippet(loaded(document), read_options(EnvoyOptions, {"snippet": True, **flags}))

    assert f"for Envoy {version} and newer" in bootstrap(document, **flags)
    assert f"for Envoy\n# {version} and newer" in snippet
