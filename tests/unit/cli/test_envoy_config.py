"""The Envoy bootstrap that is made from policies: its routes, and what is told of flags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.apis import COUNT_PLACES, EVENT_OBJECTS
from extproc.cli.envoy_config.template import fill
from extproc.cli.envoy_config.usage import write_event_rules
from extproc.cli.main import main
from extproc.errors import UsageError
from tests.support import ROOT
from tests.support.documents import bundle, policy
from tests.support.envoy_config import DOCUMENTS, SAMPLE, UPSTREAM, bootstrap


def address_of(place: Mapping[str, Any]) -> tuple[str, int] | str:
    """Where Envoy listens or connects to."""
    address = place["address"]
    if "pipe" in address:
        return str(address["pipe"]["path"])
    return address["socket_address"]["address"], address["socket_address"]["port_value"]


def addresses(cluster: Mapping[str, Any]) -> list[tuple[str, int] | str]:
    """Where each endpoint of a cluster is."""
    return [address_of(item["endpoint"]) for item in cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]]


def routes(text: str) -> list[tuple[str, str, bool]]:
    """Name, match and whether Loopguard is asked, of every route in order."""
    found = re.findall(r"- name: (.*)\n +match: \{(.*)\}\n +route: .*\n( +typed_per_filter_config:\n)?", text)
    return [(name.strip('"'), match, bool(guard)) for name, match, guard in found]


def test_events_are_read_by_few_rules() -> None:
    """Envoy copies them for each request; every count that stands in an object is in one that they find."""
    within = tuple(f"{place}." for place in EVENT_OBJECTS)
    left = {place for places in COUNT_PLACES.values() for place in places if not place.startswith(within)}

    assert len(yaml.safe_load(write_event_rules())) == 8
    assert left == {"prompt_eval_count", "eval_count"}


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
    """Alone they would leave a side unverified: Envoy would trust any server, or no server Envoy. What is missing is named."""
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
        ([{"pathExact": "/a/api/chat"}, {"apis": ["ollama"], "routes": ["x"]}], ["x", "x", "unguarded"]),
        ([{"pathExact": "/a"}, {"apis": ["ollama"], "routes": ["x"]}], ["guarded:/a", "x", "unguarded"]),
        ([{"pathPrefix": "/a"}, {"apis": ["ollama"], "routes": ["x"]}], ["x", "x", "unguarded"]),
        ([{"apis": ["ollama"]}, {"pathPrefix": "/", "routes": ["x"]}], ["x", "x"]),
        ([{"apis": ["ollama"], "routes": ["x"]}, {"pathPrefix": "/"}], ["x", "guarded:/*"]),
        ([{"apis": ["ollama"]}, {"apis": ["gemini"], "routes": ["x"]}], ["guarded:ollama", "x", "unguarded"]),
    ],
)
def test_routes_get_the_names_that_selectors_ask_for(selectors: Sequence[Mapping[str, object]], names: Sequence[str]) -> None:
    """A route has the name that its policies select by, else that of what is around it, so that every policy can match."""
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
