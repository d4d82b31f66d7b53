"""The Envoy configuration that `loopguard envoy-config` prints."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.apis import COUNT_PLACES, EVENT_OBJECTS
from extproc.cli.envoy_config.template import fill
from extproc.cli.envoy_config.usage import write_event_rules
from extproc.errors import UsageError
from tests.support import ROOT
from tests.support.budget_policies import bucket, limited
from tests.support.check_envoy import MANAGER, find
from tests.support.command import Run, written
from tests.support.documents import bundle, policy
from tests.support.envoy_config import DOCUMENTS, SAMPLE, UPSTREAM, bootstrap

PLAIN = bundle(policy("p", {"pathPrefix": "/v1/"}, limit_keys=["header:x"]))
COSTS = bundle(
    {
        "id": "costs",
        "spec": {
            "selector": {"pathPrefix": "/v1/"},
            "limit_keys": ["header:x"],
            "session_limits": {
                "max_cost_per_session": 1,
                "unknown_model": {"input": 1, "output": 1},
            },
        },
    }
)
Configure = Callable[..., Run]
LISTENER, CLUSTERS = "/static_resources/listeners/0", "/static_resources/clusters"
ENDPOINTS = "load_assignment/endpoints/0/lb_endpoints"
TLS = "transport_socket/typed_config"


@pytest.fixture
def configure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Configure:
    def run(*flags: str, policies: object = None) -> Run:
        file = str(SAMPLE) if policies is None else written(tmp_path / "policies.json", policies)
        named = [] if {"--upstream", "--snippet"} & {*flags} else ["--upstream", UPSTREAM]
        return Run(capsys, "envoy-config", "--policy", file, *named, *flags)

    return run


def routes(text: str) -> list[tuple[str, str, bool]]:
    """Name, match and whether Loopguard is called, of every route in order."""
    found = re.findall(
        r"- name: (.*)\n +match: \{(.*)\}\n +route: .*\n( +typed_per_filter_config:\n)?", text
    )
    return [(name.strip('"'), match, bool(guard)) for name, match, guard in found]


def test_few_rules_read_the_usage_of_events() -> None:
    within = tuple(f"{place}." for place in EVENT_OBJECTS)
    left = {
        place
        for places in COUNT_PLACES.values()
        for place in places
        if not place.startswith(within)
    }

    assert len(yaml.safe_load(write_event_rules())) == 8
    assert left == {"prompt_eval_count", "eval_count"}


@pytest.mark.parametrize(
    ("name", "shadow_mode"),
    [
        ("bootstrap", "off"),
        ("bootstrap-observability", "observability"),
        ("bootstrap-partial", "partial"),
    ],
)
def test_committed_bootstraps_are_current(name: str, shadow_mode: str) -> None:
    text = bootstrap(DOCUMENTS["sample"], shadow_mode=shadow_mode)
    committed = (ROOT / "envoy" / f"{name}.yaml").read_text(encoding="utf-8")

    flags = f"--policy envoy/policy.json --upstream {UPSTREAM} --shadow-mode {shadow_mode}"
    assert committed == text, (
        f"out of date; make it again: loopguard envoy-config {flags} > envoy/{name}.yaml"
    )


def test_observability_mode_has_nothing_for_decisions() -> None:
    text = bootstrap(DOCUMENTS["sample"], shadow_mode="observability").partition("clusters:")[0]

    assert (
        re.findall(
            (
                r"DYNAMIC_METADATA|receiving|message_timeout|longest "
                r"delay|throttled|refused(?!-stream)"
            ),
            text,
        )
        == []
    )


def socket(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def test_every_flag_has_its_place(configure: Configure) -> None:
    flags = (
        "--upstream api.example.com:443 --upstream-tls --upstream-ca /ca.pem --listen "
        "0.0.0.0:80 --admin 127.0.0.1:81"
    )
    flags += (
        " --endpoints 10.0.0.1:1,10.0.0.2:2 --endpoints unix:/x --body-mode tolerant "
        "--buffer-limit 99999"
    )
    flags += " --failure-mode deny --upstream-protocol http2"
    route = f"{MANAGER}/route_config/virtual_hosts/0/routes/0"
    per_route = f"{route}/typed_per_filter_config/envoy.filters.http.ext_proc"
    expected = {
        f"{CLUSTERS}/1/{ENDPOINTS}/0/endpoint/address": socket("api.example.com", 443),
        f"{CLUSTERS}/0/{ENDPOINTS}/0/endpoint/address": socket("10.0.0.1", 1),
        f"{CLUSTERS}/0/{ENDPOINTS}/1/endpoint/address": socket("10.0.0.2", 2),
        f"{CLUSTERS}/0/{ENDPOINTS}/2/endpoint/address": {"pipe": {"path": "/x"}},
        f"{CLUSTERS}/1/{TLS}/sni": "api.example.com",
        f"{CLUSTERS}/1/{TLS}/common_tls_context/validation_context/trusted_ca": {
            "filename": "/ca.pem"
        },
        f"{LISTENER}/address": socket("0.0.0.0", 80),  # noqa: S104  # not bound
        f"{LISTENER}/per_connection_buffer_limit_bytes": 99_999,
        "/admin/address": socket("127.0.0.1", 81),
        f"{MANAGER}/http_filters/0/typed_config/failure_mode_allow": False,
        f"{per_route}/overrides/processing_mode/request_body_mode": "BUFFERED_PARTIAL",
    }

    run = configure(*flags.split())

    made = yaml.safe_load(run.out)
    (protocol,) = find(made, f"{CLUSTERS}/1/typed_extension_protocol_options").values()
    assert (run.code, run.err) == (0, "")
    assert {pointer: find(made, pointer) for pointer in expected} == expected
    assert protocol["explicit_http_config"] == {"http2_protocol_options": {}}


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--upstream", "api.example.com"),
        ("--upstream", "https://api.example.com"),
        ("--upstream", "api.example.com:0"),
        ("--upstream", "api.example.com:65536"),
        ("--upstream", "a b:80"),
        ("--upstream", ":80"),
        ("--upstream", "unix:/run/upstream.sock"),
        ("--upstream-protocol", "h2c"),
        ("--listen", "localhost:10000"),
        ("--listen", "unix:/run/envoy.sock"),
        ("--admin", "9901"),
        ("--endpoints", "50051"),
        ("--endpoints", "127.0.0.1:50051,"),
        ("--endpoints", "unix:/run/loopguard.sock,loopguard.example:50051"),
        ("--body-mode", "lenient"),
        ("--buffer-limit", "10MiB"),
        ("--buffer-limit", "1000"),
        ("--buffer-limit", "9999999999"),
        ("--failure-mode", "open"),
        ("--shadow-mode", "on"),
        ("--otlp", "api.example.com:443"),
        ("--upstream-ca", "/ca.pem"),
    ],
)
def test_invalid_flag_is_a_one_line_error(flag: str, value: str, configure: Configure) -> None:
    run = configure(flag, value)

    assert (run.code, run.out) == (2, "")
    assert run.complaint.startswith(f"loopguard: {flag} must ")


TLS_FILES = ["--endpoint-cert", "c", "--endpoint-key", "k", "--endpoint-ca", "a"]
DECIDED = [
    (
        [flag, value, "--shadow-mode", mode],
        f"{flag} must be left out where --shadow-mode {mode} decides that, not '{value}'",
    )
    for mode in ("observability", "partial")
    for flag, value in (("--failure-mode", "deny"), ("--body-mode", "tolerant"))
]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (TLS_FILES[:2], "--endpoint-cert needs --endpoint-key and --endpoint-ca as well"),
        (
            ["--endpoint-san", "guard.example"],
            "--endpoint-san needs --endpoint-cert and --endpoint-key and --endpoint-ca as well",
        ),
        (
            [*TLS_FILES, "--endpoints", "unix:/run/loopguard.sock"],
            "--endpoint-cert needs --endpoint-san as well, because a Unix socket has no name",
        ),
        *DECIDED,
    ],
)
def test_contradicting_flags_are_an_error(
    flags: list[str], line: str, configure: Configure
) -> None:
    run = configure(*flags)

    assert (run.code, run.complaint) == (2, f"loopguard: {line}")


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (
            ["--endpoints", "guard.example:1,guard.example:2,[::1]:1"],
            [("DNS", "guard.example"), ("IP_ADDRESS", "::1")],
        ),
        (
            ["--endpoint-san", "spiffe://a/b", "--endpoint-san", "c"],
            [("URI", "spiffe://a/b"), ("DNS", "c")],
        ),
    ],
)
def test_envoy_verifies_the_name_of_loopguard(
    flags: list[str], names: list[tuple[str, str]], configure: Configure
) -> None:
    made = yaml.safe_load(configure(*TLS_FILES, *flags).out)

    context = find(made, f"{CLUSTERS}/0/{TLS}/common_tls_context/validation_context")
    assert [
        (name["san_type"], name["matcher"]["exact"])
        for name in context["match_typed_subject_alt_names"]
    ] == names


SHADOWED = policy("b", {"pathPrefix": "/"}, mode="shadow")
ACTING = policy("a", {"pathPrefix": "/"})
NO_TLS = "warning: port 8443 usually speaks TLS, and Envoy will not; add --upstream-tls\n"


@pytest.mark.parametrize(
    ("flags", "policies", "told"),
    [
        (["--shadow-mode", "partial"], [ACTING, SHADOWED], "would act: a;"),
        (["--shadow-mode", "partial"], [SHADOWED], ""),
        (
            ["--shadow-mode", "partial"],
            [policy("a", {"pathPrefix": "/"}, enabled=False), SHADOWED],
            "",
        ),
        (["--shadow-mode", "observability"], [ACTING], ""),
        (["--upstream", "api.example.com:8443"], None, NO_TLS),
        ([], DOCUMENTS["nothing guarded"], "guards nothing"),
    ],
)
def test_suspicious_flags_are_warned_about(
    flags: list[str], policies: object, told: str, configure: Configure
) -> None:
    run = configure(*flags, policies=policies)

    assert run.code == 0
    assert (told in run.err) if told else run.err == ""
    assert told != "guards nothing" or routes(run.out) == [("unguarded", "prefix: /", False)]


@pytest.mark.parametrize(
    ("upstream", "more", "tls"),
    [
        ("api.example.com:443", [], True),
        ("192.0.2.1:443", [], True),
        ("api.example.com:8443", ["--upstream-tls"], True),
        ("api.example.com:8443", [], False),
        ("127.0.0.1:8080", [], False),
    ],
)
def test_port_443_means_tls(
    upstream: str, more: list[str], tls: bool, configure: Configure
) -> None:
    (cluster,) = yaml.safe_load(configure("--upstream", upstream, *more).out)["static_resources"][
        "clusters"
    ][1:2]

    assert (cluster["name"], "transport_socket" in cluster) == ("upstream", tls)
    assert not tls or "trusted_ca" in find(cluster, f"/{TLS}/common_tls_context/validation_context")


@pytest.mark.parametrize(
    ("document", "flags", "version"),
    [
        (PLAIN, [], "1.36"),
        (COSTS, [], "1.38"),
        (COSTS, ["--usage", "estimated"], "1.36"),
        (COSTS, ["--shadow-mode", "observability"], "1.36"),
        (PLAIN, ["--body-mode", "tolerant"], "1.38"),
        (PLAIN, ["--body-mode", "duplex"], "1.38"),
        (PLAIN, ["--shadow-mode", "partial"], "1.38"),
        (PLAIN, ["--tolerant-routes", "/v1/"], "1.38"),
        (bundle(limited(bucket())), [], "1.36"),
    ],
)
def test_header_names_the_required_envoy_version(
    document: object, flags: list[str], version: str, configure: Configure
) -> None:
    for form in ((), ("--snippet",)):
        assert f"for Envoy {version} and newer" in configure(*form, *flags, policies=document).out


def test_most_specific_route_is_first() -> None:
    selectors = [
        {"pathPrefix": "/v1"},
        {"pathExact": "/v1/chat"},
        {"pathPrefix": "/v1/chat/"},
        {"pathPrefix": "/v1/chat"},
    ]

    assert routes(
        bootstrap(
            bundle(*(policy(f"p{number}", selector) for number, selector in enumerate(selectors)))
        )
    ) == [
        ("guarded:/v1/chat", 'path: "/v1/chat"', True),
        ("guarded:/v1/chat/*", 'prefix: "/v1/chat/"', True),
        ("guarded:/v1/chat*", 'path_separated_prefix: "/v1/chat"', True),
        ("guarded:/v1*", 'path_separated_prefix: "/v1"', True),
        ("unguarded", "prefix: /", False),
    ]


@pytest.mark.parametrize(
    ("selectors", "names"),
    [
        ([{"pathExact": "/a", "routes": ["x"]}], ["x", "unguarded"]),
        ([{"pathExact": "/a"}, {"pathExact": "/a"}], ["guarded:/a", "unguarded"]),
        (
            [{"pathExact": "/a", "routes": ["x", "y"]}, {"pathExact": "/a", "routes": ["y", "z"]}],
            ["y", "unguarded"],
        ),
        ([{"pathExact": "/v1/a"}, {"pathPrefix": "/v1", "routes": ["x"]}], ["x", "x", "unguarded"]),
        (
            [{"pathPrefix": "/v1/a/b"}, {"pathPrefix": "/v1/", "routes": ["x"]}],
            ["x", "x", "unguarded"],
        ),
        (
            [{"pathPrefix": "/v1a"}, {"pathPrefix": "/v1", "routes": ["x"]}],
            ["guarded:/v1a*", "x", "unguarded"],
        ),
        (
            [{"pathExact": "/v1/a", "routes": ["y"]}, {"pathPrefix": "/v1", "routes": ["x"]}],
            ["y", "x", "unguarded"],
        ),
        ([{"routes": ["x"]}], ["x"]),
        ([{"routes": ["x"]}, {"pathExact": "/a"}], ["x", "x"]),
        ([{"routes": ["x"]}, {"pathPrefix": "/", "methods": ["POST"]}], ["x"]),
        ([{"routes": ["x"]}, {"pathExact": "/a", "routes": ["x"]}], ["x", "unguarded"]),
        ([{"routes": ["y"]}, {"pathExact": "/a", "routes": ["x"]}], ["x", "y"]),
        (
            [{"pathExact": "/a/api/chat"}, {"apis": ["ollama"], "routes": ["x"]}],
            ["x", "x", "unguarded"],
        ),
        (
            [{"pathExact": "/a"}, {"apis": ["ollama"], "routes": ["x"]}],
            ["guarded:/a", "x", "unguarded"],
        ),
        ([{"pathPrefix": "/a"}, {"apis": ["ollama"], "routes": ["x"]}], ["x", "x", "unguarded"]),
        ([{"apis": ["ollama"]}, {"pathPrefix": "/", "routes": ["x"]}], ["x", "x"]),
        ([{"apis": ["ollama"], "routes": ["x"]}, {"pathPrefix": "/"}], ["x", "guarded:/*"]),
        (
            [{"apis": ["ollama"]}, {"apis": ["gemini"], "routes": ["x"]}],
            ["guarded:ollama", "x", "unguarded"],
        ),
    ],
)
def test_routes_have_the_names_of_selectors(
    selectors: Sequence[Mapping[str, object]], names: Sequence[str]
) -> None:
    text = bootstrap(
        bundle(*(policy(f"p{number}", selector) for number, selector in enumerate(selectors)))
    )

    assert [name for name, _, _ in routes(text)] == names
    assert len(names) > 2 or "guarded:/a" not in names or "# Policies: p0, p1\n" in text


@pytest.mark.parametrize(
    ("selectors", "told"),
    [
        ([{"routes": ["x", "y"]}], "p0 select by route alone"),
        ([{"routes": ["x"]}, {"routes": ["y"]}], "p0, p1 select by route alone"),
        (
            [{"pathExact": "/a", "routes": ["x"]}, {"pathExact": "/a", "routes": ["y"]}],
            "the path /a can have one route name",
        ),
        (
            [{"routes": ["x"]}, {"pathPrefix": "/", "routes": ["y"]}],
            "the path / can have one route name",
        ),
    ],
)
def test_contradicting_route_names_are_an_error(
    selectors: Sequence[Mapping[str, object]], told: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        bootstrap(
            bundle(*(policy(f"p{number}", selector) for number, selector in enumerate(selectors)))
        )


@pytest.mark.parametrize(
    "template", sorted((ROOT / "extproc" / "cli" / "envoy_config" / "templates").iterdir()), ids=str
)
def test_templates_are_yaml(template: Path) -> None:
    assert yaml.safe_load(template.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("template", "values", "expected"),
    [
        ("a: $x # $x\n", {"x": "1"}, "a: 1 # 1\n"),
        ("a: $x\n", {"x": "$y"}, "a: $y\n"),
        ("  #$x\nz\n", {"x": "a\n\n  b\n"}, "  a\n\n    b\nz\n"),
        ("  #$x\nz\n", {"x": ""}, "z\n"),
        ("#if x\na\n#else\nb\n#end\nc\n", {"x": True}, "a\nc\n"),
        ("#if x\na\n#else\nb\n#end\nc\n", {"x": ""}, "b\nc\n"),
        ("#if x\n  #if y\n  a\n  #else\n  b\n  #end\n#end\n", {"x": "1", "y": False}, "  b\n"),
        (
            "#if x\n#if y\na\n#else\nb\n#end\n#$z\n#else\nc\n#end\n",
            {"x": False, "y": False, "z": "1"},
            "c\n",
        ),
        ("# if x\n#  $x\n\n", {"x": "1"}, "# if x\n#  1\n\n"),
    ],
)
def test_template_is_filled(template: str, values: dict[str, str | bool], expected: str) -> None:
    assert fill(template, values) == expected
