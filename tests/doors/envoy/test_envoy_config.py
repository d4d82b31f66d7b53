"""The Envoy bootstrap that is made from policies, judged by the real Envoy."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml

from extproc.apis import COUNT_PLACES, EVENT_OBJECTS
from extproc.cli.envoy_config.template import fill
from extproc.cli.envoy_config.usage import write_event_rules
from extproc.cli.main import main
from extproc.engine.engine import Index
from extproc.errors import UsageError
from extproc.policy.bundle import Selector
from extproc.request.fingerprint import normalize_path
from tests.support import ROOT
from tests.support.documents import bundle, policy
from tests.support.envoy_config import UPSTREAM, bootstrap, verdict
from tests.support.harness import ENVOY, Stack, Upstream, eventually, stack

SAMPLE = ROOT / "envoy" / "policy.json"

DOCUMENTS: dict[str, Any] = {
    "sample": json.loads(SAMPLE.read_text()),
    "nothing guarded": bundle(policy("off", {"pathPrefix": "/"}, enabled=False)),
    "everything guarded": bundle(policy("all", {"pathPrefix": "/"})),
    "every kind of selector": bundle(
        policy("both", {"pathExact": "/v1", "pathPrefix": "/v1/"}),
        policy("below", {"pathPrefix": "/v1/chat", "routes": ["llm", "chat"], "hosts": ["a.example"], "methods": ["POST"]}),
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

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "fail closed": {"failure_mode": "deny"},
    "large bodies": {"buffer_limit": 2**31 - 1},
    "small bodies": {"buffer_limit": 65_535},
    "all interfaces": {"listen": ":10000", "admin": "[::1]:9901"},
    "unix socket": {"endpoints": ["unix:/run/loopguard.sock", "127.0.0.1:50051", "[::1]:50051"]},
    "HTTP/2 upstream": {"upstream_protocol": "http2"},
    "upstream of both": {"upstream_protocol": "as-client"},
    "names": {"upstream": "upstream.example:80", "endpoints": ["loopguard.example:50051", "127.0.0.1:50051"]},
    "looking on": {"shadow_mode": "observability"},
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
"""  # of nobody: Envoy only has to be able to read it


def address_of(place: Mapping[str, Any]) -> tuple[str, int] | str:
    """Where Envoy listens or connects to."""
    address = place["address"]
    if "pipe" in address:
        return str(address["pipe"]["path"])
    return address["socket_address"]["address"], address["socket_address"]["port_value"]


def addresses(cluster: Mapping[str, Any]) -> list[tuple[str, int] | str]:
    """Where each endpoint of a cluster is."""
    return [address_of(item["endpoint"]) for item in cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]]


def version() -> tuple[int, int]:
    """Major and minor version of the Envoy under test."""
    told = subprocess.run([ENVOY, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"/(\d+)\.(\d+)\.\d+/", told)
    assert found, told
    return int(found[1]), int(found[2])


def routes(text: str) -> list[tuple[str, str, bool]]:
    """Name, match and whether Loopguard is asked, of every route in order."""
    found = re.findall(r"- name: (.*)\n +match: \{(.*)\}\n +route: .*\n( +typed_per_filter_config:\n)?", text)
    return [(name.strip('"'), match, bool(guard)) for name, match, guard in found]


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_envoy_accepts_it(document: object, options: Mapping[str, Any], tmp_path: Path) -> None:
    """Whatever the policies and the options, the real Envoy finds nothing wrong with the bootstrap."""
    text = bootstrap(document, **options)

    assert verdict(text, tmp_path).endswith("OK\n")


COSTS: dict[str, Any] = {"max_cost_per_session": 1, "unknown_model": {"input": 1, "output": 1}}
ERRORS: dict[str, Any] = {"circuit_breaker": {"consecutive_errors": 3}}


@pytest.mark.parametrize(
    ("limits", "options", "told", "read"),
    [
        (COSTS, {}, True, True),
        (COSTS, {"usage": "estimated"}, True, False),
        (COSTS, {"shadow_mode": "observability"}, False, False),
        (COSTS, {"buffer_limit": 65_535}, True, True),
        (ERRORS, {}, True, False),
        ({"max_steps": 3}, {}, False, False),
    ],
)
def test_envoy_tells_what_answers_cost(
    limits: dict[str, Any], options: dict[str, Any], told: bool, read: bool, tmp_path: Path
) -> None:
    """Where a policy limits it, and as exactly as Envoy can; no other configuration looks into answers."""
    spec = {"selector": {"pathPrefix": "/v1/"}, "limit_keys": ["header:x-user-id"], "session_limits": limits}

    text = bootstrap(bundle({"id": "agents", "spec": spec}), **options)

    assert verdict(text, tmp_path).endswith("OK\n") == (version() >= (1, 38) or not read)
    assert ("envoy.access_loggers.http_grpc" in text) == told
    assert [name in text for name in ("sse_to_metadata", "json_to_metadata", "accept-encoding")] == [read] * 3


def test_events_are_read_by_few_rules() -> None:
    """Envoy copies them for each request; every count that stands in an object is in one that they find."""
    within = tuple(f"{place}." for place in EVENT_OBJECTS)
    left = {place for places in COUNT_PLACES.values() for place in places if not place.startswith(within)}

    assert len(yaml.safe_load(write_event_rules())) == 8
    assert left == {"prompt_eval_count", "eval_count"}


@pytest.mark.parametrize("protocol", ["http1", "http2", "as-client"])
@pytest.mark.parametrize("upstream", ["api.example.com:443", "192.0.2.1:443", "[2001:db8::1]:443"])
def test_envoy_accepts_tls(upstream: str, protocol: str, tmp_path: Path) -> None:
    """TLS to the upstream verifies its certificate against a name or an address, and Envoy accepts that."""
    authority = tmp_path / "ca.pem"
    authority.write_text(CERTIFICATE)
    flags = {"upstream": upstream, "upstream_protocol": protocol, "upstream_tls": True, "upstream_ca": str(authority)}

    text = bootstrap(DOCUMENTS["sample"], **flags)

    assert verdict(text, tmp_path).endswith("OK\n")
    assert "auto_sni_san_validation" in text or "match_typed_subject_alt_names" in text
    assert ("auto_host_rewrite: true" in text) == upstream.startswith("api")


@pytest.mark.parametrize("options", [{"body_mode": "tolerant"}, {"shadow_mode": "partial"}])
def test_envoy_accepts_tolerant(options: dict[str, Any], tmp_path: Path) -> None:
    """The tolerant body mode buffers what fits and keeps content-length; only Envoy 1.38 and newer can do that."""
    text = bootstrap(DOCUMENTS["sample"], **options)

    assert "request_body_mode: BUFFERED_PARTIAL" in text
    assert verdict(text, tmp_path).endswith("OK\n") == (version() >= (1, 38))


def test_the_jwt_example_works(tmp_path: Path) -> None:
    """The commented-out filter for verified claims is valid as soon as it is uncommented."""
    keys = tmp_path / "jwks.json"
    keys.write_text(json.dumps({"keys": [{"kty": "oct", "alg": "HS256", "kid": "k", "k": "c2VjcmV0"}]}))
    text = bootstrap(DOCUMENTS["sample"])
    example = re.search(r"( *# - name: envoy.filters.http.jwt_authn\n)( *#  .*\n)+", text)
    assert example
    live = re.sub(r"^( *)# ", r"\1", example[0], flags=re.MULTILINE).replace("/etc/envoy/jwks.json", str(keys))

    said = verdict(text.replace(example[0], live), tmp_path)

    assert said.endswith("OK\n")


@pytest.mark.parametrize(
    ("name", "shadow_mode"),
    [("bootstrap", "off"), ("bootstrap-observability", "observability"), ("bootstrap-partial", "partial")],
)
def test_the_committed_bootstraps_are_current(name: str, shadow_mode: str) -> None:
    """Each envoy/bootstrap*.yaml is what the command prints for envoy/policy.json."""
    text = bootstrap(DOCUMENTS["sample"], shadow_mode=shadow_mode)

    committed = (ROOT / "envoy" / f"{name}.yaml").read_text(encoding="utf-8")

    flags = f"--policy envoy/policy.json --upstream {UPSTREAM} --shadow-mode {shadow_mode}"
    assert committed == text, f"out of date; make it again: loopguard envoy-config {flags} > envoy/{name}.yaml"


def test_looking_on_carries_nothing_that_needs_an_answer() -> None:
    """Where answers are ignored, nothing is made of decisions, and no comment speaks of a request that is held or refused."""
    text = bootstrap(DOCUMENTS["sample"], shadow_mode="observability")
    lines = text.partition("clusters:")[0].splitlines()

    found = [
        line
        for line in lines
        if re.search(r"DYNAMIC_METADATA|receiving|message_timeout|longest delay|throttled|refused(?!-stream)", line)
    ]

    assert found == []


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the bootstrap and nothing else, with every flag in its place."""
    flags = "--upstream api.example.com:443 --upstream-tls --upstream-ca /ca.pem --listen 0.0.0.0:80 --admin 127.0.0.1:81"
    flags += " --endpoints 10.0.0.1:1,10.0.0.2:2 --endpoints unix:/x --body-mode tolerant --buffer-limit 99999"
    flags += " --failure-mode deny --upstream-protocol http2"

    code = main(["envoy-config", "--policy", str(SAMPLE), *flags.split()])

    printed = capsys.readouterr()
    made = yaml.safe_load(printed.out)
    listener, (guard, upstream) = made["static_resources"]["listeners"][0], made["static_resources"]["clusters"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    asking = manager["http_filters"][0]["typed_config"]
    route = manager["route_config"]["virtual_hosts"][0]["routes"][0]
    shown = route["typed_per_filter_config"]["envoy.filters.http.ext_proc"]["overrides"]["processing_mode"]
    tls = upstream["transport_socket"]["typed_config"]
    protocol = next(iter(upstream["typed_extension_protocol_options"].values()))
    assert (code, printed.err) == (0, "")
    assert addresses(upstream) == [("api.example.com", 443)]
    assert addresses(guard) == [("10.0.0.1", 1), ("10.0.0.2", 2), "/x"]
    assert (address_of(listener), address_of(made["admin"])) == (("0.0.0.0", 80), ("127.0.0.1", 81))  # noqa: S104  # not bound
    assert tls["sni"] == "api.example.com"
    assert tls["common_tls_context"]["validation_context"]["trusted_ca"] == {"filename": "/ca.pem"}
    assert protocol["explicit_http_config"] == {"http2_protocol_options": {}}
    assert listener["per_connection_buffer_limit_bytes"] == 99_999
    assert shown["request_body_mode"] == "BUFFERED_PARTIAL"
    assert asking["failure_mode_allow"] is False


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
    ],
)
def test_a_bad_flag_is_told_in_one_line(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that cannot be used ends with exit code 2 and one line that names it and what was given."""
    flags = {"--upstream": UPSTREAM, flag: value}

    code = main(["envoy-config", "--policy", str(SAMPLE), *(item for pair in flags.items() for item in pair)])

    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert printed.err.count("\n") == 1
    assert printed.err.startswith(f"loopguard: {flag} must ")


TLS_FILES = ["--endpoint-cert", "c", "--endpoint-key", "k", "--endpoint-ca", "a"]


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
    ],
)
def test_half_of_tls_is_told(flags: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Envoy would trust anybody, or nobody it, without the others: what is missing is named."""
    code = main(["envoy-config", "--policy", str(SAMPLE), "--upstream", UPSTREAM, *flags])

    assert (code, capsys.readouterr().err) == (2, f"loopguard: {line}\n")


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--endpoints", "guard.example:1,guard.example:2,[::1]:1"], [("DNS", "guard.example"), ("IP_ADDRESS", "::1")]),
        (["--endpoint-san", "spiffe://a/b", "--endpoint-san", "c"], [("URI", "spiffe://a/b"), ("DNS", "c")]),
    ],
)
def test_envoy_knows_loopguard_by_name(
    flags: list[str], names: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its certificate has to be made out to one of the endpoints' hosts, or to one of the names that are given."""
    main(["envoy-config", "--policy", str(SAMPLE), "--upstream", UPSTREAM, *TLS_FILES, *flags])

    cluster = yaml.safe_load(capsys.readouterr().out)["static_resources"]["clusters"][0]
    context = cluster["transport_socket"]["typed_config"]["common_tls_context"]["validation_context"]
    assert [(name["san_type"], name["matcher"]["exact"]) for name in context["match_typed_subject_alt_names"]] == names


@pytest.mark.parametrize("mode", ["observability", "partial"])
@pytest.mark.parametrize(("flag", "value"), [("--failure-mode", "deny"), ("--body-mode", "tolerant")])
def test_looking_on_leaves_no_choice(mode: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What a shadow mode decides cannot be decided otherwise at the same time."""
    code = main(["envoy-config", "--policy", str(SAMPLE), "--upstream", UPSTREAM, "--shadow-mode", mode, flag, value])

    assert code == 2
    assert capsys.readouterr().err == (
        f"loopguard: {flag} must be left out where --shadow-mode {mode} decides that, not '{value}'\n"
    )


@pytest.mark.parametrize(
    ("mode", "policies", "told"),
    [
        ("partial", [policy("a", {"pathPrefix": "/"}), policy("b", {"pathPrefix": "/"}, mode="shadow")], "would act: a;"),
        ("partial", [policy("b", {"pathPrefix": "/"}, mode="shadow")], ""),
        ("partial", [policy("a", {"pathPrefix": "/"}, enabled=False), policy("b", {"pathPrefix": "/"}, mode="shadow")], ""),
        ("observability", [policy("a", {"pathPrefix": "/"})], ""),
    ],
)
def test_what_would_act_all_the_same_is_told(
    mode: str, policies: list[dict[str, Any]], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `partial`, enforcing policies are named in a warning: only serve --shadow keeps them from acting."""
    file = tmp_path / "policies.json"
    file.write_text(json.dumps(policies))

    main(["envoy-config", "--policy", str(file), "--upstream", UPSTREAM, "--shadow-mode", mode])

    said = capsys.readouterr().err
    assert (told in said) if told else said == ""


def test_a_required_flag_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --upstream there is no bootstrap."""
    code = main(["envoy-config", "--policy", str(SAMPLE)])

    assert code == 2
    assert "--upstream" in capsys.readouterr().err


def test_nothing_guarded_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Policies that do nothing still make a bootstrap, with a warning that it guards nothing."""
    file = tmp_path / "policies.json"
    file.write_text(json.dumps(DOCUMENTS["nothing guarded"]))

    code = main(["envoy-config", "--policy", str(file), "--upstream", UPSTREAM])

    printed = capsys.readouterr()
    assert code == 0
    assert routes(printed.out) == [("unguarded", "prefix: /", False)]
    assert "guards nothing" in printed.err


def test_the_most_specific_route_is_first() -> None:
    """Envoy takes the first route that matches: exact paths stand first, then prefixes, the longest first, then the rest."""
    selectors = [{"pathPrefix": "/v1"}, {"pathExact": "/v1/chat"}, {"pathPrefix": "/v1/chat/"}, {"pathPrefix": "/v1/chat"}]
    document = bundle(*(policy(f"p{number}", selector) for number, selector in enumerate(selectors)))

    text = bootstrap(document)

    assert routes(text) == [
        ("guarded:/v1/chat", 'path: "/v1/chat"', True),
        ("guarded:/v1/chat/*", 'prefix: "/v1/chat/"', True),
        ("guarded:/v1/chat*", 'path_separated_prefix: "/v1/chat"', True),
        ("guarded:/v1*", 'path_separated_prefix: "/v1"', True),
        ("unguarded", "prefix: /", False),
    ]


def test_policies_on_one_path_share_a_route() -> None:
    """Two policies with the same path make one route, which names both."""
    document = bundle(policy("live", {"pathExact": "/a"}), policy("canary", {"pathExact": "/a"}, mode="shadow"))

    text = bootstrap(document)

    assert [name for name, _, guarded in routes(text) if guarded] == ["guarded:/a"]
    assert "# Policies: live, canary\n" in text


@pytest.mark.parametrize(
    ("selectors", "names"),
    [
        ([{"pathExact": "/a", "routes": ["x"]}], ["x", "unguarded"]),
        ([{"pathExact": "/a", "routes": ["x", "y"]}, {"pathExact": "/a", "routes": ["y", "z"]}], ["y", "unguarded"]),
        ([{"pathExact": "/v1/a"}, {"pathPrefix": "/v1", "routes": ["x"]}], ["x", "x", "unguarded"]),
        ([{"pathPrefix": "/v1/a/b"}, {"pathPrefix": "/v1/", "routes": ["x"]}], ["x", "x", "unguarded"]),
        ([{"pathPrefix": "/v1a"}, {"pathPrefix": "/v1", "routes": ["x"]}], ["guarded:/v1a*", "x", "unguarded"]),
        ([{"pathExact": "/v1/a", "routes": ["y"]}, {"pathPrefix": "/v1", "routes": ["x"]}], ["y", "x", "unguarded"]),
        ([{"routes": ["x"]}], ["x"]),
        ([{"routes": ["x"]}, {"pathExact": "/a"}], ["x", "x"]),
        ([{"routes": ["x"]}, {"pathPrefix": "/", "methods": ["POST"]}], ["x"]),
        ([{"routes": ["x"]}, {"pathExact": "/a", "routes": ["x"]}], ["x", "unguarded"]),
        ([{"routes": ["y"]}, {"pathExact": "/a", "routes": ["x"]}], ["x", "y"]),
    ],
)
def test_routes_get_the_names_that_selectors_ask_for(selectors: Sequence[Mapping[str, object]], names: Sequence[str]) -> None:
    """A route has the name that its policies select by, else that of the path around it, so that every policy can match."""
    document = bundle(*(policy(f"p{number}", selector) for number, selector in enumerate(selectors)))

    text = bootstrap(document)

    assert [name for name, _, _ in routes(text)] == names


@pytest.mark.parametrize(
    ("selectors", "told"),
    [
        ([{"routes": ["x", "y"]}], "p0 select by route alone"),
        ([{"routes": ["x"]}, {"routes": ["y"]}], "p0, p1 select by route alone"),
        ([{"pathExact": "/a", "routes": ["x"]}, {"pathExact": "/a", "routes": ["y"]}], "the path /a can have one route name"),
        ([{"routes": ["x"]}, {"pathPrefix": "/", "routes": ["y"]}], "the path / can have one route name"),
    ],
)
def test_names_that_cannot_be_placed(selectors: Sequence[Mapping[str, object]], told: str) -> None:
    """Where one set of routes cannot serve all the selectors, the error names the policies and what to change."""
    document = bundle(*(policy(f"p{number}", selector) for number, selector in enumerate(selectors)))

    with pytest.raises(UsageError, match=re.escape(told)):
        bootstrap(document)


def test_envoy_and_the_policies_agree_on_paths() -> None:
    """The real Envoy shows Loopguard exactly the requests whose path some selector takes, and both see one spelling of it."""
    odd = """/$y"'{}*&^|<>`~[]"""
    selectors = [{"pathPrefix": path} for path in ("/v1", "/v2/", "/d/e", "/m%3a1", "/n%3A/")]
    selectors += [{"pathExact": path} for path in ("/x", "/d/e/", "/e%2ff", odd)]
    targets = ["/", "/v1", "/v1/", "/v1/a", "/v1?q=/v2/", "/v1a", "/V1", "/v2", "/v2/", "/v2/a/b", "/v2//a"]
    targets += ["/x", "/x?y=1", "/x/", "/xy", "//x", "/./x", "/%78", "/d", "/d/e/f", "/d/e/", "/d/ef", "/?/v1", odd]
    targets += ["/m%3a1", "/m%3A1/x", "/m%3a1x", "/n%3A/x", "/n%3a/", "/n%3a", "/e%2Ff", "/e%2ff", "/e/f", "/e%2Ff/"]
    document = bundle(*(policy(f"p{number}", selector) for number, selector in enumerate(selectors)))
    index = Index([(Selector.model_validate(selector), number) for number, selector in enumerate(selectors)])
    with stack(document) as running:
        statuses = [running.send(target).status for target in targets]

        counted = running.loopguard.metric("requests_total")
        unmatched = running.loopguard.metric("unmatched_total")

    seen = [normalize_path(quote(target.partition("?")[0], safe="/%!$&'()*+,;=:@[]")) for target in targets]
    assert set(statuses) <= {200, 429}
    assert unmatched == 0
    assert counted == sum(len(index.match("GET", "", path)) for path in seen)


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "spelling",
    [
        "/v1/chat/complet%69ons",
        "//v1//chat/completions",
        "/./v1/chat/completions",
        "/v1/%2e/chat/completions",
        "/x/../v1/chat/completions",
        "/x/%2e%2e/v1/chat/completions",
        "/../%2E%2E/v1/chat/completions",
        "/%76%31/ch%61t/completions",
        "/v1\\chat\\completions",
    ],
)
def test_no_spelling_of_a_path_escapes(spelling: str, running: Stack) -> None:
    """Another spelling of a guarded path takes the guarded route, and the upstream sees the path that was guarded."""
    before = running.loopguard.metric("requests_total")
    seen = len(running.upstream.seen)

    running.send(f"{spelling}?{quote(spelling)}")

    assert running.loopguard.metric("requests_total") == before + 1
    assert [each.target.partition("?")[0] for each in running.upstream.seen[seen:]] == [CHAT]


@pytest.fixture(scope="module")
def running() -> Iterator[Stack]:
    """A guarded path, counted by user."""
    with stack(bundle(policy("chat", {"pathExact": CHAT}, limit_keys=["header:x-user", "ip:address"]))) as made:
        yield made


def test_a_route_alone_is_enough() -> None:
    """A policy that selects by nothing but a route's name sees the requests of that route, whatever their path."""
    document = bundle(policy("by-name", {"routes": ["main"]}))
    with stack(document) as running:
        statuses = [running.send("/anything").status for _ in range(3)]

    assert statuses == [200, 200, 429]


# ---- One count, one upstream request

RETRY = {"x-envoy-retry-on": "retriable-status-codes", "x-envoy-retriable-status-codes": "200", "x-envoy-max-retries": "5"}
SLOW = {"x-envoy-upstream-rq-per-try-timeout-ms": "50", "x-envoy-retry-on": "5xx", "x-envoy-max-retries": "5"}


@pytest.mark.parametrize(
    "forged",
    [
        RETRY,
        {"x-envoy-retry-on": "retriable-headers", "x-envoy-retriable-header-names": "content-type", "x-envoy-max-retries": "9"},
        {"x-envoy-retry-on": "5xx,reset,connect-failure,gateway-error,retriable-4xx,refused-stream,http3-post-connect-failure"},
        {"x-envoy-retry-grpc-on": "cancelled,deadline-exceeded,internal,resource-exhausted,unavailable"},
        {"x-envoy-upstream-rq-timeout-ms": "50", "x-envoy-upstream-rq-timeout-alt-response": "1"},
        SLOW,
        {**SLOW, "x-envoy-hedge-on-per-try-timeout": "true"},
        {**SLOW, "x-envoy-is-timeout-retry": "true"},
        {"x-envoy-expected-rq-timeout-ms": "50"},
        {"x-envoy-upstream-stream-duration-ms": "50"},
        {"grpc-timeout": "50m"},
        {"x-envoy-upstream-alt-stat-name": "forged"},
        {"x-envoy-original-path": "/elsewhere", "x-envoy-original-url": "/elsewhere", "x-envoy-original-host": "elsewhere"},
        {"x-envoy-original-dst-host": "127.0.0.1:1"},
        {"x-envoy-decorator-operation": "forged"},
        {"x-envoy-force-trace": "true", "x-client-trace-id": "forged"},
        {"x-envoy-external-address": "203.0.113.9"},
        {"x-forwarded-for": "0.0.0.0, 10.0.0.1"},
        {**RETRY, "x-forwarded-for": "10.0.0.1"},
        {**RETRY, "x-envoy-internal": "true"},
        {"x-envoy-attempt-count": "7"},
        {"x-envoy-downstream-service-cluster": "forged", "x-envoy-downstream-service-node": "forged"},
        {"x-envoy-ip-tags": "forged"},
        {"x-envoy-overloaded": "true", "x-envoy-local-overloaded": "true", "x-envoy-ratelimited": "true"},
        {"x-envoy-degraded": "true", "x-envoy-immediate-health-check-fail": "true"},
        {"x-envoy-upstream-canary": "true", "x-envoy-upstream-healthchecked-cluster": "forged"},
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("path", ["/v1/chat", "/v1/hang"])
def test_a_request_that_counts_once_reaches_the_upstream_once(path: str, forged: dict[str, str], gate: Stack) -> None:
    """Whatever a client says in headers of Envoy's own, its request is neither multiplied nor hidden by them."""
    user = {"x-user": f"{path} {forged}"}
    gate.upstream.seen.clear()
    with later(gate.upstream, 0.3 if "hang" in path else 0):
        refused = [gate.send(path, headers={**user, **forged}).status == 429 for _ in range(3)]

    assert refused == [False, False, True]
    assert [seen.target for seen in gate.upstream.seen] == [path] * 2
    assert gate.envoy.admin("/stats?filter=forged") == ""


@contextmanager
def later(upstream: Upstream, seconds: float) -> Iterator[None]:
    """Answer what hangs only after so many seconds, which is longer than any timeout that a client asks for."""
    upstream.release.clear()
    timer = threading.Timer(seconds, upstream.release.set)
    timer.start()
    yield
    timer.join()


@pytest.fixture(scope="module")
def gate() -> Iterator[Stack]:
    """Everything guarded, counted by user and by the address that Envoy believes."""
    with stack(bundle(policy("all", {"pathPrefix": "/"}, limit_keys=["header:x-user", "ip:address"]))) as made:
        yield made


def test_private_networks_are_believed_by_default() -> None:
    """What the bootstrap takes back: where no range is named, a client of this network has one request sent six times."""

    def trusting(text: str) -> str:
        return re.sub(r"internal_address_config: .*", "internal_address_config: {}", text)

    with stack(bundle(policy("all", {"pathPrefix": "/"})), edit=trusting) as made:
        made.send("/", headers=RETRY)

        assert len(made.upstream.seen) == 6


# ---- A Loopguard that has died


def test_a_dead_replica_costs_no_request_anything() -> None:
    """Under `deny` a request that finds its Loopguard dead is decided by another one, before health checks have noticed."""
    document = bundle(policy("all", {"pathPrefix": "/"}))
    with stack(document, replicas=3, failure_mode="deny") as made:
        made.replicas[1].signal(signal.SIGKILL)
        made.replicas[1].wait()

        found = {made.send(f"/{number}", method="POST", body=b"x" * 100_000).status for number in range(100)}

        assert found == {200}
        assert made.envoy.stat("cluster.loopguard.upstream_rq_retry") > 0
        assert made.envoy.stat("http.ingress.ext_proc.streams_failed") == 0


@pytest.mark.parametrize("seconds", [0.02, 0.2])
def test_a_replica_that_hangs_costs_no_request_anything(seconds: float) -> None:
    """Under `deny` requests that come every so often find their Loopguard silent, and are decided in time by another one."""

    def in_time(config: str) -> str:
        """Envoy hangs up before it decides by itself; here each has ten times as long as it is given."""
        assert "message_timeout: 0.2s" in config
        assert "timeout: 0.15s" in config
        return config.replace("message_timeout: 0.2s", "message_timeout: 5s").replace("timeout: 0.15s", "timeout: 1.5s")

    document = bundle(policy("all", {"pathPrefix": "/"}))
    with stack(document, replicas=3, failure_mode="deny", edit=in_time, hasty=True) as made:
        found = [made.send(f"/before/{number}").status for number in range(20)]
        made.replicas[1].signal(signal.SIGSTOP)
        time.sleep(0.1)  # a stream that is opened earlier takes the silence for that of a moment
        for number in range(20):
            found.append(made.send(f"/{number}", method="POST", body=b"x" * 1_000).status)
            time.sleep(seconds)
        made.replicas[1].signal(signal.SIGCONT)

        assert found == [200] * 40
        assert made.envoy.stat("cluster.loopguard.upstream_rq_retry") > 0
        eventually(lambda: made.envoy.stat("cluster.loopguard.membership_healthy") == 3, "all are asked again")


def test_the_only_replica_is_asked_again_after_a_stall() -> None:
    """One Loopguard that stood still for a moment is not left out: the next request is counted."""
    with stack(bundle(policy("all", {"pathPrefix": "/"})), failure_mode="deny", hasty=True) as made:
        made.send("/")
        made.loopguard.signal(signal.SIGSTOP)
        time.sleep(0.1)
        missed = made.send("/").status
        made.loopguard.signal(signal.SIGCONT)

        assert missed in (500, 504)
        numbers = itertools.count()
        assert eventually(lambda: made.send(f"/{next(numbers)}").status == 200, "an answer")
        assert made.envoy.stat("cluster.loopguard.membership_healthy") == 1


# ---- Templates

TEMPLATES = sorted((ROOT / "extproc" / "cli" / "envoy_config" / "templates").iterdir())


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_a_template_is_yaml_by_itself(template: Path) -> None:
    """An editor that knows YAML finds nothing wrong with a template, gaps and all."""
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
        ("#if x\n#if y\na\n#else\nb\n#end\n#$z\n#else\nc\n#end\n", {"x": False, "y": False, "z": "1"}, "c\n"),
        ("# if x\n#  $x\n\n", {"x": "1"}, "# if x\n#  1\n\n"),
    ],
)
def test_gaps_are_filled(template: str, values: dict[str, str | bool], expected: str) -> None:
    """Values, blocks and conditions, and nothing else, are taken out of a template."""
    assert fill(template, values) == expected


# ---- Looking on

needs_content_length = pytest.mark.skipif(version() < (1, 38), reason="Envoy 1.38 is the first that buffers in part like this")
SHADOW_MODES = ["observability", pytest.param("partial", marks=needs_content_length)]
LIMIT = 65_535


@pytest.mark.parametrize("mode", SHADOW_MODES)
def test_a_shadow_mode_touches_nothing(mode: str) -> None:
    """Loops are counted and nobody is refused, held or warned; bodies of any size pass as they came; Loopguard may be gone."""
    document = bundle(
        policy("refuse", {"pathExact": "/refuse"}),
        policy("hold", {"pathExact": "/hold"}, action="throttle"),
        policy("warn", {"pathExact": "/warn"}, action="warn"),
    )
    flags = ["--shadow"] if mode == "partial" else []
    with stack(document, *flags, shadow_mode=mode, buffer_limit=LIMIT) as made:
        answers = [made.send(path, method="POST", body=b"same") for path in ("/refuse", "/hold", "/warn") for _ in range(4)]
        larger = made.send("/refuse", method="POST", body=b"x" * 50 * LIMIT)
        received = made.upstream.seen[-1]
        eventually(lambda: made.loopguard.metric("loops_detected_total") == 6, "six loops")
        made.loopguard.stop()
        without = made.send("/refuse", method="POST", body=b"same")

    assert [answer.status for answer in (*answers, larger, without)] == [200] * 14
    assert all("x-fairvisor-warning" not in answer.headers for answer in answers)
    assert all(seen.header("x-fairvisor-warning") is None for seen in made.upstream.seen)
    assert (received.header("content-length"), len(received.body)) == (str(50 * LIMIT), 50 * LIMIT)


@pytest.mark.parametrize(
    ("mode", "counted"),
    [("observability", 3), pytest.param("partial", 0, marks=needs_content_length)],
)
def test_what_a_shadow_mode_counts_of_large_bodies(mode: str, counted: int) -> None:
    """Looking on sees whole bodies however large they are; buffering in part sees a part, and does not count it."""
    with stack(bundle(policy("p", {"pathPrefix": "/"})), "--shadow", shadow_mode=mode, buffer_limit=LIMIT) as made:
        for _ in range(3):
            made.send("/", method="POST", body=b"x" * 50 * LIMIT)
        seen = eventually(
            lambda: (
                (
                    made.loopguard.metric("requests_total", policy="p"),
                    made.loopguard.metric("uncounted_total", reason="body_truncated"),
                )
                if made.loopguard.metric("requests_total") + made.loopguard.metric("uncounted_total") == 3
                else None
            )
        )

    assert seen == (counted, 3 - counted)


@needs_content_length
def test_an_enforcing_policy_acts_on_a_partial_body() -> None:
    """What the snippet's head says: without --shadow it is the policies that decide."""
    with stack(bundle(policy("p", {"pathPrefix": "/"})), shadow_mode="partial") as made:
        found = [made.send("/", method="POST", body=b"same").status for _ in range(3)]

    assert found == [200, 200, 429]
