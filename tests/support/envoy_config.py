import json
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from extproc.cli.envoy_config.options import EnvoyOptions
from extproc.cli.envoy_config.render import render_bootstrap
from extproc.options import read_options
from extproc.policy.loader import PolicySet, parse
from tests.support import ROOT
from tests.support.documents import bundle, policy, read_yaml
from tests.support.harness import ENVOY

UPSTREAM = "127.0.0.1:8080"


def loaded(document: object) -> PolicySet:
    return parse({"policies.json": json.dumps(document).encode()}, datetime.now(UTC))


def bootstrap(document: object, **flags: object) -> str:
    return render_bootstrap(
        loaded(document), read_options(EnvoyOptions, {"upstream": UPSTREAM, **flags})
    )


def verdict(text: str, folder: Path) -> str:
    file = folder / "bootstrap.yaml"
    file.write_text(text, encoding="utf-8")
    checked = subprocess.run(
        [ENVOY, "--mode", "validate", "-c", str(file), "-l", "error"],
        capture_output=True,
        text=True,
        check=False,
    )
    return checked.stdout + checked.stderr


def theirs(printed: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a user's own Envoy, on the ports and the upstream of `bootstrap`."""
    (listener,) = printed["static_resources"]["listeners"]
    upstream = printed["static_resources"]["clusters"][1]
    to_upstream = {"cluster": "upstream", "timeout": "0s"}
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network"
        ".http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "theirs",
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
                },
            }
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {"name": "chat", "match": {"prefix": "/chat"}, "route": to_upstream},
                        {"name": "files", "match": {"prefix": "/files"}, "route": to_upstream},
                        {"name": "rest", "match": {"prefix": "/"}, "route": to_upstream},
                    ],
                }
            ]
        },
    }
    chain = {
        "filters": [
            {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
        ]
    }
    return {
        "admin": printed["admin"],
        "static_resources": {
            "listeners": [
                {"name": "theirs", "address": listener["address"], "filter_chains": [chain]}
            ],
            "clusters": [{key: upstream[key] for key in ("name", "type", "load_assignment")}],
        },
    }


def find_places(inside: Any, path: str) -> Iterator[Any]:  # noqa: ANN401  # a configuration
    """The values at a path, in which `[]` is every entry of a list."""
    step, _, rest = path.partition(".")
    found = inside[step.removesuffix("[]")]
    for place in found if step.endswith("[]") else [found]:
        yield from find_places(place, rest) if rest else [place]


LATE = """
function envoy_on_request(handle)
  local path = handle:headers():get(":path")
  if path:sub(1, 6) == "/late/" then
    handle:headers():replace(":path", path:sub(6))
    handle:clearRouteCache()
  end
end
"""


def choose_late(text: str) -> str:
    """A filter that moves requests below /late/ to another route after the headers phase."""
    made = read_yaml(text)
    (manager,) = find_places(
        made, "static_resources.listeners[].filter_chains[].filters[].typed_config"
    )
    lua = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
        "default_source_code": {"inline_string": LATE},
    }
    manager["http_filters"].insert(0, {"name": "late", "typed_config": lua})
    return json.dumps(made)


SAMPLE = ROOT / "envoy" / "policy.json"

DOCUMENTS: dict[str, Any] = {
    "sample": json.loads(SAMPLE.read_text()),
    "nothing guarded": bundle(policy("off", {"pathPrefix": "/"}, enabled=False)),
    "everything guarded": bundle(policy("all", {"pathPrefix": "/"})),
    "every kind of selector": bundle(
        policy("both", {"pathExact": "/v1", "pathPrefix": "/v1/"}),
        policy(
            "below",
            {
                "pathPrefix": "/v1/chat",
                "routes": ["llm", "chat"],
                "hosts": ["a.example"],
                "methods": ["POST"],
            },
        ),
        policy("route", {"routes": ["main"]}),
    ),
    "paths that YAML could misread": bundle(
        *(
            policy(f"p{number}", {"pathExact": path, "pathPrefix": path})
            for number, path in enumerate(
                [
                    '/"',
                    "/'",
                    "/{a: b}",
                    "/- x",
                    "/a: b",
                    "/%7E",
                    "/\\n",
                    "/$limit",
                    "/*x",
                    "/\u00e9\U0001f600",
                    "/\u2028",
                    "/\u007f",
                ]
            )
        )
    ),
}


CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBdDCCARugAwIBAgIUZSpFQ1PfoG/71qIiQTt1Tfd5cH4wCgYIKoZIzj0EAwIw
DzENMAsGA1UEAwwEdGVzdDAgFw0yNjExMjEyMjQwMjlaGA8yMTI2MTAyODIyNDAy
OVowDzENMAsGA1UEAwwEdGVzdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABMsW
Y8knHDfT5tjWre6H1XG3pXxWP3D+OAvbseR4c/eEQpTv5g2/3Fh5FRlZF/adtX/3
cLRd6/Dt8iiaMLq7hRSjUzBRMB0GA1UdDgQWBBQ+chabTBUc2DR4A9kqD0LxGk9R
bTAfBgNVHSMEGDAWgBQ+chabTBUc2DR4A9kqD0LxGk9RbTAPBgNVHRMBAf8EBTAD
AQH/MAoGCCqGSM49BAMCA0cAMEQCIBM6PschlseGNy8cZeYtztTO9jsi9kuZlphe
TZI7q67eAiBeQeiPO+sjfHpDPJ3WSx6fU3EZA2uwgzjilbqzjEm91g==
-----END CERTIFICATE-----
"""  # with no owner: Envoy only has to be able to read it
