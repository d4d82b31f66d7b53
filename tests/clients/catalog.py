"""The clients of `make test-clients`: how to install and start each, and its model's script.

In commands, environments and files, `{url}` is Envoy's address, `{key}` the API key of a run,
`{home}` and `{work}` its home and the folder that it works in, `{bin}` the folder of the client's
commands, and `{prompt}` the task. In what the model asks for, `{file}` is the file to read, and
`{task}` the task of a sub-agent.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from fake_model import Call

Step: TypeAlias = Call | str

NPM, PYPI = "npm", "PyPI"
# What must be true of every client:
# - noted: the model reads a note after its third identical turn
# - refused: a model that continues is refused in the end
# - ends: the client ends within `MOST_SECONDS` of its first refusal
# - message: the refusal's message is on the client's screen
# - finishes: the client finishes its task, if its model follows the note
# - agents: limits of agents hold, and the main agent reads the reason and finishes
# - healthy: steps that differ are not acted on
PROMISES: Final = ("noted", "refused", "ends", "message", "finishes", "agents", "healthy")

KEY: Final = "{key}"
_NO_FILES: Final[Mapping[str, str]] = {}
_AGENTS: Final = str(Path(__file__).with_name("agents.py"))
# The model's last words; on a client's screen, they show that the task was finished.
DONE: Final = "This is my final report."


class Client(NamedTuple):
    """A client.

    Attributes:
        name: for `--only`; the part before a slash is its folder.
        source: NPM or PYPI.
        packages: with versions; the first is the client's own.
        command: command line.
        environment: in addition to `_ENVIRONMENT`.
        step: what the model asks for in each turn, a call or a text.
        end: how the model ends a task.
        loop: files that the model asks for in turn when it loops: several, where a client stops
            identical calls itself.
        files: written before a run, by path.
        before: command to run first.
        spawn: how the model starts a sub-agent, if the client has them.
        wait: how it waits for them, if their results come later; `{agents}` is an id of one.
        names_agents: requests name their agent and its session.
        nests: so do those of agents that its agents start.
        compacts: it asks the model for a summary when its context is full.
        remark: for the page.
        allowed: exceptions, with the reason, by the name of the promise.
    """

    name: str
    source: str
    packages: tuple[str, ...]
    command: tuple[str, ...]
    environment: Mapping[str, str]
    step: Step
    end: Step = DONE
    loop: tuple[str, ...] = ("missing.txt",)
    files: Mapping[str, str] = _NO_FILES
    before: tuple[str, ...] = ()
    spawn: Call | None = None
    wait: Call | None = None
    names_agents: bool = False
    nests: bool = False
    compacts: bool = False
    remark: str = ""
    allowed: Mapping[str, str] = _NO_FILES

    @property
    def folder(self) -> str:
        return self.name.partition("/")[0]

    @property
    def version(self) -> str:
        return self.packages[0].rpartition("@" if self.source == NPM else "==")[2]


_QUIET: Final = {
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"disableAutoUpdate": True},
}
_GEMINI: Final = {
    **_QUIET,
    "model": {"disableLoopDetection": True},  # its own, which stops before the limits are met
    "security": {"auth": {"selectedType": "gemini-api-key"}},
}
_OPENAI: Final = {
    "OPENAI_API_KEY": KEY,
    "OPENAI_BASE_URL": "{url}/v1",
    "OPENAI_API_BASE": "{url}/v1",
}
_TWO: Final = ("missing.txt", "absent.txt")
_ALTERNATES: Final = "stops identical calls itself, so its model alternates between two calls"
_READ: Final = Call("read_file", {"path": "{file}"})


def _codex(name: str, settings: str, key: str) -> Client:
    settings = f"model_auto_compact_token_limit = 100000\n{settings}"
    config = (
        'model = "gpt-5.1-codex"\ncheck_for_update_on_startup = '
        f"false\n{settings}\n[analytics]\nenabled = false\n"
    )
    return Client(
        name,
        NPM,
        ("@openai/codex@0.169.0",),
        (
            "{bin}/codex",
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            "{prompt}",
        ),
        {key: KEY, "CODEX_HOME": "{home}/.codex"},
        Call("exec_command", {"cmd": "cat {file}"}),
        files={"{home}/.codex/config.toml": config},
        compacts=True,
        names_agents=True,
        spawn=Call("multi_agent_v1.spawn_agent", {"message": "{task}"}),
        wait=Call("multi_agent_v1.wait_agent", {"targets": ["{agents}"], "timeout_ms": 60_000}),
    )


def _python(name: str, packages: tuple[str, ...], **more: object) -> Client:
    """A library, used by the function of its name in `agents.py`."""
    function = name.replace("/", "_").replace("-", "_")
    command = ("{bin}/python", "-P", _AGENTS, function, "{prompt}")
    given: dict[str, object] = {"environment": _OPENAI, "step": _READ, **more}
    return Client(name, PYPI, packages, command, **given)  # type: ignore[arg-type]


_OPENCODE: Final = {
    "$schema": "https://opencode.ai/config.json",
    "autoupdate": False,
    "share": "disabled",
    "permission": {"*": "allow"},
    "subagent_depth": 3,
    "agent": {"general": {"permission": {"task": "allow"}}},
    "model": "mine/model",
    "provider": {
        "mine": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "mine",
            "options": {"baseURL": "{url}/v1", "apiKey": KEY},
            "models": {
                "model": {
                    "name": "model",
                    "tool_call": True,
                    "limit": {"context": 200_000, "output": 8_000},
                }
            },
        }
    },
}

CLIENTS: Final = (
    Client(
        "claude-code",
        NPM,
        ("@anthropic-ai/claude-code@2.1.331",),
        ("{bin}/claude", "-p", "{prompt}", "--allowedTools", "Read", "Agent", "Task"),
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_API_KEY": KEY,
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
        Call("Read", {"file_path": "{file}"}),
        compacts=True,
        names_agents=True,
        nests=True,
        spawn=Call(
            "Agent",
            {"description": "{task}", "prompt": "{task}", "subagent_type": "general-purpose"},
        ),
    ),
    _codex(
        "codex",
        'model_provider = "mine"\n[model_providers.mine]\nname = "mine"\nbase_url = "{url}/v1"\n'
        'env_key = "KEY"\nwire_api = "responses"',
        "KEY",
    ),
    _codex("codex/websocket", 'openai_base_url = "{url}/v1"', "CODEX_API_KEY"),
    Client(
        "opencode",
        NPM,
        ("opencode-ai@1.18.33",),
        ("{bin}/opencode", "run", "{prompt}"),
        {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        },
        Call("read", {"filePath": "{file}"}),
        compacts=True,
        names_agents=True,
        nests=True,
        files={"{work}/opencode.json": json.dumps(_OPENCODE)},
        spawn=Call(
            "task", {"description": "{task}", "prompt": "{task}", "subagent_type": "general"}
        ),
        remark="runs with `subagent_depth`, without which its sub-agents start no others",
    ),
    Client(
        "gemini-cli",
        NPM,
        ("@google/gemini-cli@0.61.0",),
        ("{bin}/gemini", "-p", "{prompt}", "--yolo", "--skip-trust"),
        {"GEMINI_API_KEY": KEY, "GOOGLE_GEMINI_BASE_URL": "{url}"},
        Call("read_file", {"file_path": "{file}"}),
        spawn=Call("invoke_agent", {"agent_name": "generalist", "prompt": "{task}"}),
        files={"{home}/.gemini/settings.json": json.dumps(_GEMINI)},
        remark="runs without its own loop detection, which would end it first",
    ),
    Client(
        "qwen-code",
        NPM,
        ("@qwen-code/qwen-code@0.24.4",),
        ("{bin}/qwen", "-p", "{prompt}", "--yolo", "--auth-type", "openai"),
        {**_OPENAI, "OPENAI_MODEL": "qwen-x"},
        Call("read_file", {"file_path": "{file}"}),
        loop=_TWO,
        compacts=True,
        spawn=Call(
            "agent",
            {"description": "{task}", "prompt": "{task}", "subagent_type": "general-purpose"},
        ),
        remark=_ALTERNATES,
        files={"{home}/.qwen/settings.json": json.dumps(_QUIET)},
    ),
    Client(
        "cline",
        NPM,
        ("cline@3.0.65",),
        ("{bin}/cline", "--auto-approve", "true", "-P", "openai", "{prompt}"),
        {"CLINE_TELEMETRY_DISABLED": "1", "DO_NOT_TRACK": "1"},
        Call("read_files", {"paths": ["{file}"]}),
        loop=_TWO,
        remark=_ALTERNATES,
        before=("{bin}/cline", "auth", "-p", "openai", "-k", KEY, "-m", "gpt-x", "-b", "{url}/v1"),
    ),
    Client(
        "mini-swe-agent",
        PYPI,
        ("mini-swe-agent==2.4.6",),
        ("{bin}/mini", "-m", "openai/gpt-x", "-t", "{prompt}", "-y", "--exit-immediately"),
        {
            **_OPENAI,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": "{home}/mini",
            "MSWEA_SILENT_STARTUP": "1",
        },
        Call("bash", {"command": "cat {file}"}),
        end=Call("bash", {"command": f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {DONE}"}),
    ),
    _python(
        "smolagents/code",
        ("smolagents[openai]==1.26.0",),
        step="Thought: I read the file.\n<code>\nprint(read_file('{file}'))\n</code>",
        end=f"Thought: This is the end.\n<code>\nfinal_answer('{DONE}')\n</code>",
    ),
    _python(
        "smolagents/tools",
        ("smolagents[openai]==1.26.0",),
        end=Call("final_answer", {"answer": DONE}),
    ),
    _python(
        "deepagents",
        ("deepagents==0.7.32", "langchain-openai"),
        compacts=True,
        step=Call("read_file", {"file_path": "{file}"}),
        spawn=Call("task", {"description": "{task}", "subagent_type": "general-purpose"}),
    ),
    _python("pydantic-ai", ("pydantic-ai-slim[openai]==2.68.0",)),
    _python(
        "openai-agents",
        ("openai-agents==0.24.0",),
        environment={**_OPENAI, "OPENAI_AGENTS_DISABLE_TRACING": "1"},
        spawn=Call("ask_colleague", {"input": "{task}"}),
    ),
    _python("strands", ("strands-agents[openai]==1.62.0",)),
    _python(
        "langchain-google",
        ("langchain-google-genai==4.4.2", "langchain"),
        environment={"GOOGLE_API_KEY": KEY},
    ),
    _python("google-adk", ("google-adk==2.13.0",), environment={"GOOGLE_API_KEY": KEY}),
    _python(
        "crewai",
        ("crewai==1.15.30",),
        environment={**_OPENAI, "CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"},
        allowed={"refused": "ends itself at the fifth identical call"},
    ),
)
