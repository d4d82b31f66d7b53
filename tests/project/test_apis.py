"""Everything peculiar to an API is in its own file below `extproc/apis`."""

import re
from collections.abc import Iterator
from pathlib import Path

from extproc.apis import APIS
from tests.support import ROOT

PACKAGE = ROOT / "extproc"
NAMES = ("openai", "anthropic", "gemini", "bedrock", "ollama", "vertex", "azure")
# Protocols that other rooms name, too, and an API whose name is a usual word.
UNNAMED = {"grpc", "json_rpc", "responses"}
# In bodies, answers and paths, in addition to what the APIs declare.
FIELDS = (
    *(
        "jsonrpc",
        "json-rpc",
        "tools/call",
        "message/send",
        '"isError"',
        "function_call",
        "functionCall",
        "functionResponse",
    ),
    *(
        "tool_choice",
        "toolChoice",
        "parallel_tool",
        "tool_use",
        "toolUse",
        "tool_result",
        "toolResult",
    ),
    *(
        "functionDeclarations",
        "function_declarations",
        "toolConfig",
        "tool_config",
        "input_schema",
        "inputSchema",
    ),
    *(
        "previous_response",
        "stream_options",
        "generateContent",
        "usageMetadata",
        "prompt_tokens",
        "completion_tokens",
    ),
    *(
        "promptTokenCount",
        "inputTokens",
        "eval_count",
        "additional_tools",
        "/deployments/",
        "/model/",
        "/models/",
    ),
)

# Words that mean something else here.
ALLOWED = {
    (
        "detectors/actions.py",
        "function_call",
    ): "a key by which models write an action into a text, whatever the API",
    ("detectors/scratchpad.py", "tool_result"): "a key of steps that programs write into a text",
    ("cli/commands/explain.py", "/v1/messages"): "a path in an example",
    ("cli/commands/explain.py", "/chat/completions"): "a path in an example",
    ("cli/commands/explain.py", "/completions"): "a path in an example",
    ("request/fingerprint.py", "/chat/completions"): "a path in an example",
    ("request/fingerprint.py", "/completions"): "a path in an example",
    ("cli/scan/atif.py", "prompt_tokens"): "ATIF's own",
    ("cli/scan/atif.py", "completion_tokens"): "ATIF's own",
    ("cli/scan/claude_code.py", "tool_use"): "in a key of its printed streams",
    **dict.fromkeys(
        [
            *[
                (f"cli/scan/{name}.py", "gemini")
                for name in ("files", "formats", "gemini_cli", "lines")
            ],
            ("cli/commands/scan.py", "gemini"),
        ],
        "the name of a program, Gemini CLI",
    ),
    ("cli/scan/gemini_cli.py", "functionCall"): "in what that program writes, and in what it sends",
    ("cli/scan/gemini_cli.py", "functionResponse"): "likewise",
    ("cli/scan/otlp.py", "prompt_tokens"): "of older semantic conventions",
    ("cli/scan/otlp.py", "completion_tokens"): "of older semantic conventions",
    **dict.fromkeys(
        [
            ("decision.py", "prompt_tokens"),
            ("budgets/rule_keys.py", "prompt_tokens"),
            ("budgets/rule_keys.py", "completion_tokens"),
            ("budgets/guard.py", "prompt_tokens"),
            ("budgets/guard.py", "completion_tokens"),
            ("policy/rules.py", "completion_tokens"),
        ],
        "in keys and reasons of the bundle format",
    ),
    (
        "cli/envoy_config/templates/bootstrap.yaml",
        "/responses",
    ): "a comment that says which WebSockets are refused",
}


def list_words() -> list[str]:
    declared: list[str] = []
    for api in APIS:
        secrets = {key.partition(":")[2] for key in api.credentials} - {"authorization"}
        declared += [*api.headers, *secrets, *api.streamed_documents, *api.blocks, *api.locators]
        declared += [path.removesuffix(r"\Z") for path in api.paths]
    # Others are words of English
    peculiar = [word for word in declared if re.fullmatch(r".*([-_/:]|[a-z][A-Z]).*", word)]
    return sorted({*NAMES, *FIELDS, *peculiar})


def test_every_api_is_listed() -> None:
    files = {
        file.stem
        for file in (PACKAGE / "apis").glob("*.py")
        if re.search(r"^API\b.*=", file.read_text(), re.MULTILINE)
    }

    assert files - UNNAMED <= {*NAMES}


def find_words(text: str, words: list[str]) -> Iterator[str]:
    lower = text.lower()
    return (word for word in words if word.lower() in lower)


def list_files() -> list[Path]:
    away = (PACKAGE / "apis", PACKAGE / "pb", PACKAGE / "policy" / "presets")
    files = [
        file
        for file in sorted(PACKAGE.rglob("*"))
        if file.suffix in {".py", ".json", ".yaml", ".html", ".lua"}
    ]
    return [file for file in files if not any(file.is_relative_to(folder) for folder in away)]


def test_api_words_stay_in_apis() -> None:
    words = list_words()
    found = {
        (str(file.relative_to(PACKAGE)), word)
        for file in list_files()
        for word in find_words(file.read_text(), words)
    }
    assert found == ALLOWED.keys()
