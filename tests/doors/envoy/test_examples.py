"""The settings, policies and clients of the examples, with Envoy in place of its container.

Not tested: the images, LiteLLM, Claude Code and Codex (`make test-clients` runs the latter two).
"""

import json
import re
import shlex
import sys
import tomllib
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trustme
import yaml

from extproc import settings
from extproc.cli.main import main
from extproc.policy.presets import find_preset
from extproc.store.rules.tree import AGENT_LIMITS
from tests.support import ROOT
from tests.support.chart import CASES
from tests.support.documents import bundle
from tests.support.envoy_config import verdict
from tests.support.harness import Answer, Process, envoy_version, eventually, stack
from tests.support.servers import free_port
from tests.support.stacks import open_before_model
from tests.support.usage import whole

EXAMPLES = ROOT / "examples"
COMPOSE = EXAMPLES / "compose"
BODIES = ROOT / "tests" / "support" / "bodies"


def read_policy(example: str, name: str = "agents") -> Any:  # noqa: ANN401  # JSON
    return json.loads((EXAMPLES / example / "policies" / f"{name}.json").read_text())


def read_services(*names: str) -> dict[str, Any]:
    """The services of compose files, merged as compose does."""
    found: dict[str, Any] = {}
    for name in names:
        for service, keys in yaml.safe_load((COMPOSE / name).read_text())["services"].items():
            found[service] = {**found.get(service, {}), **keys}
    return found


def fill(text: str) -> str:
    """A value of a compose file, with the defaults of its variables."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_compose_settings_are_good_and_ports_are_local() -> None:
    services = read_services("compose.yaml", "enforce.yaml")
    loopguard = services["loopguard"]
    chosen = settings.read_settings(
        {}, {name: fill(str(value)) for name, value in loopguard["environment"].items()}
    )

    assert settings.find_unknown(loopguard["environment"]) == []
    assert "environment" not in read_services("compose.yaml")["loopguard"]  # so it watches
    assert [fill(each) for each in loopguard["volumes"]] == [f"./policies:{chosen.policy[0]}:ro"]
    assert not chosen.shadow
    assert chosen.store == "redis://valkey:6379/0"
    assert main(["validate", str(COMPOSE / "policies")]) == 0
    assert all(
        port.startswith("127.0.0.1:")
        for each in services.values()
        for port in each.get("ports", ())
    )
    assert [
        name
        for name, each in services.items()
        if not re.fullmatch(r"\$\{[A-Z]+_IMAGE:-[^}]+\}", each["image"])
    ] == []


@pytest.mark.parametrize("upstream", ["provider:8080", "api.openai.com:443"])
def test_compose_envoy_accepts_the_printed_bootstrap(
    upstream: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    services = read_services("compose.yaml")
    _, _, script = services["configure"]["entrypoint"]
    asked = shlex.split(script.replace("${UPSTREAM:-provider:8080}", upstream))
    end = asked.index(">")
    assert main(asked[1:end]) == 0
    text = capsys.readouterr().out
    authorities = tmp_path / "ca.crt"
    trustme.CA().cert_pem.write_to_path(str(authorities))

    assert verdict(
        text.replace("/etc/ssl/certs/ca-certificates.crt", str(authorities)), tmp_path
    ).endswith("OK\n")
    configuration = yaml.safe_load(text)["static_resources"]
    (listener,) = configuration["listeners"]
    assert services["envoy"]["ports"] == [
        f"127.0.0.1:10000:{listener['address']['socket_address']['port_value']}"
    ]
    assert services["envoy"]["command"][-1] == asked[end + 1]
    assert 'address: {socket_address: {address: "loopguard", port_value: 50051}}' in text


@pytest.mark.parametrize(
    ("policy", "ending"),
    [
        pytest.param(None, r"8  read_file\(path=/etc/app.yml\): error: no such file", id="watch"),
        pytest.param("compose", "4  answers: The file is missing.", id="enforce"),
    ],
)
def test_compose_agent_loops_until_told(policy: str | None, ending: str, tmp_path: Path) -> None:
    services, place = read_services("compose.yaml"), f"127.0.0.1:{free_port()}"
    assert services["provider"]["entrypoint"][2:] == ["provider", "0.0.0.0:8080"]
    demo = [sys.executable, str(COMPOSE / "demo.py")]
    with ExitStack() as opened:
        provider = Process([*demo, "provider", place], tmp_path / "provider.log")
        opened.callback(provider.stop)
        made = opened.enter_context(stack(policy and read_policy(policy), upstream=place))
        arguments = [services["agent"]["entrypoint"][2], f"http://127.0.0.1:{made.envoy.port}"]
        agent = Process([*demo, *arguments], tmp_path / "agent.log")
        opened.callback(agent.stop)
        agent.wait_for(ending)
        (row,) = made.loopguard.ask("/loops")["conversations"]

    assert row["tools"] == ["read_file"]


def test_example_policies_are_the_preset() -> None:
    """Those of LiteLLM and of companies differ as their README says."""
    preset = json.loads(Path(find_preset("agents")).read_text())
    front, company = read_policy("litellm"), read_policy("company")

    assert read_policy("compose") == preset
    assert front["spec"].pop("limit_keys") == [
        {"first_of": ["jwt:sub", "header:x-user-id", "credential"], "name": "caller"}
    ]
    assert (company["spec"].pop("labels"), company) == (["header:x-team"], preset)
    assert {**front["spec"], "limit_keys": preset["spec"]["limit_keys"]} == preset["spec"]


def test_company_agents_that_loop_are_found_by_team() -> None:
    claude = json.loads((EXAMPLES / "company" / "managed-settings.json").read_text())["env"]
    codex = tomllib.loads((EXAMPLES / "company" / "managed_config.toml").read_text())
    provider = codex["model_providers"][codex["model_provider"]]
    name, _, team = claude["ANTHROPIC_CUSTOM_HEADERS"].partition(": ")
    calls = [
        (
            f"{claude['ANTHROPIC_BASE_URL']}/v1/messages",
            "anthropic",
            {name: team, "x-api-key": "sk-a"},
        ),
        (
            f"{provider['base_url']}/responses",
            "responses",
            {**provider["http_headers"], "authorization": "Bearer b"},
        ),
    ]
    with stack(read_policy("company")) as made:
        for number, (address, api, headers) in enumerate(calls, start=1):
            made.post(urlsplit(address).path, (BODIES / f"{api}_stuck.json").read_bytes(), headers)
            assert made.loopguard.metric("loops_detected_total", policy="agents") == number
        rows = made.loopguard.ask("/loops")["conversations"]

    assert provider["wire_api"] == "responses"
    assert [row["labels"] for row in rows] == [{"x-team": "platform"}] * 2


def test_company_policies_are_the_presets_with_a_stricter_canary() -> None:
    turns, canary = [
        read_policy("company", name)["spec"]["loop_detection"] for name in ("agents", "canary")
    ]
    limits = read_policy("company", "sessions")["spec"]["session_limits"]
    preset = json.loads(Path(find_preset("sessions")).read_text())["spec"]["session_limits"]

    assert main(["validate", str(EXAMPLES / "company" / "policies")]) == 0
    assert canary == [{**turns[0], "escalate": {"land": 4, "reject": 5}}, *turns[1:]]
    assert limits.pop("escalate") == {"steer": {"max_agents": 180}}
    assert limits == {name: preset[name] for name in (*AGENT_LIMITS[1:], "reject_status")}


@pytest.mark.skipif(envoy_version() < (1, 38), reason="this Envoy reads no answers")
def test_company_has_budgets_of_teams_agent_limits_and_a_canary(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("agents", "sessions", "teams", "canary")
    policies = {name: read_policy("company", name) for name in names}
    teams = policies["teams"]["spec"]
    usage = {"prompt_tokens": 0, "completion_tokens": 900_000}  # 67.50 dollars
    for rule in (*teams["rules"], teams["fallback_limit"]):
        rule["algorithm_config"]["budget"] /= 50
    numbers = count()
    with open_before_model(bundle(*policies.values())) as (made, model):

        def send(team: str, **more: str) -> Answer:
            asked = [{"role": "user", "content": f"task {next(numbers)}"}]
            headers = {"x-team": team, "authorization": f"Bearer {team}", **more}
            return made.post("/v1/chat/completions", {"model": "m", "messages": asked}, headers)

        model.reply = whole(usage=usage)
        assert send("platform").status == 200
        budget = eventually(
            lambda: next(
                (row for row in made.loopguard.ask("/budgets")["budgets"] if row["used_up"]), None
            ),
            "a used-up budget",
        )
        model.reply = whole(usage=dict.fromkeys(usage, 0))
        refused, other = send("platform"), send("research", **{"x-claude-code-session-id": "s"})
        agents = [
            send(
                "sales",
                **{"x-claude-code-session-id": "s", "x-claude-code-agent-id": f"{number}"},
            )
            for number in range(61)
        ]
        assert main(["canary", "status", "--admin", made.loopguard.admin_url]) == 3

    assert (budget["alias"], budget["rule"]) == ("platform", "platform")
    assert refused.headers["x-loopguard-rule"] == "platform"
    assert other.status == 200
    assert [answer.status for answer in agents[:60]] == [200] * 60
    assert agents[60].headers["x-loopguard-limit"] == "max_spawns_per_minute"
    assert "agents-next, canary of agents" in capsys.readouterr().out


def test_litellm_users_are_told_apart() -> None:
    """LiteLLM sends one key for all, and forwards the header that names the user."""
    front = yaml.safe_load((EXAMPLES / "litellm" / "front.yaml").read_text())
    (model,) = front["model_list"]
    address = urlsplit(f"{model['litellm_params']['api_base']}/chat/completions")
    asked = {"model": "gpt-5.1", "messages": [{"role": "user", "content": "hello"}]}
    with stack(read_policy("litellm")) as made:
        for users, loops in ((["ann"] * 4 + ["bob"] * 4, 0), (["bob"], 1)):
            for name in users:
                made.post(
                    address.path, asked, {"authorization": "Bearer provider", "x-user-id": name}
                )
            assert made.loopguard.metric("loops_detected_total", policy="agents") == loops

    assert address.netloc == "envoy:10000"
    assert front["general_settings"]["forward_client_headers_to_llm_api"] is True
    for name in ("front", "behind"):
        assert yaml.safe_load((EXAMPLES / "litellm" / f"{name}.yaml").read_text())[
            "litellm_settings"
        ] == {"num_retries": 0}


@pytest.mark.parametrize(
    "file", sorted((EXAMPLES / "kubernetes").glob("*.yaml")), ids=lambda file: file.stem
)
def test_kubernetes_values_enforce_and_are_in_the_readme(file: Path) -> None:
    values = CASES[f"example-{file.stem}"]

    assert f"[{file.name}]({file.name})" in (EXAMPLES / "kubernetes" / "README.md").read_text()
    assert values["shadow"] == {"enabled": False}
    assert "policies" not in values


def test_started_tool_is_refused_and_polled_tool_is_not() -> None:
    document = json.loads((EXAMPLES / "mcp" / "policies" / "tools.json").read_text())

    headers = {"accept": "application/json, text/event-stream", "x-user-id": "ann"}
    with stack(document) as made:

        def call(tool: str) -> Any:  # noqa: ANN401  # JSON
            params = {"name": tool, "arguments": {"target": "all"}}
            return made.post(
                "/mcp",
                {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params},
                headers,
            ).json()

        polled = [call("get_build_status") for _ in range(6)]
        started = [call("start_build") for _ in range(2)]

    assert all("number" in answer for answer in [*polled, started[0]])  # the upstream's
    assert started[1]["result"]["isError"] is True
    assert "It is already running" in started[1]["result"]["content"][0]["text"]
