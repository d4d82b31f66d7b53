"""SDKs that ask one question, whole or streamed: Python's here, JavaScript's in `node/`."""

import fcntl
import functools
import hashlib
import json
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
from google.auth.credentials import Credentials

USER = "x-user-id"

Messages: TypeAlias = Sequence[dict[str, str]]

# A conversation that `turns` refuses at once, in every API.
STUCK: Messages = [
    {"role": "user", "content": "Tell me when build 17 is done."},
    *[
        {"role": "assistant", "content": "Action: check[build 17]"},
        {"role": "user", "content": "Observation: pending"},
    ]
    * 3,
]


class Reply(NamedTuple):
    """The model's text and status 0, or the error's text and its HTTP status."""

    text: str
    status: int = 0


class Job(NamedTuple):
    url: str
    user: str
    stream: bool = False
    messages: Messages = STUCK


def ask_chat(job: Job) -> str:
    import openai

    client = openai.OpenAI(
        api_key="none", base_url=f"{job.url}/v1", default_headers={USER: job.user}
    )
    messages: Any = job.messages
    if not job.stream:
        return (
            client.chat.completions.create(model="m", messages=messages).choices[0].message.content
            or ""
        )
    pieces = client.chat.completions.create(
        model="m", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    return "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)


def ask_responses(job: Job) -> str:
    import openai

    client = openai.OpenAI(
        api_key="none", base_url=f"{job.url}/v1", default_headers={USER: job.user}
    )
    messages: Any = job.messages
    if not job.stream:
        return client.responses.create(model="m", input=messages).output_text
    with client.responses.stream(model="m", input=messages) as events:
        return events.get_final_response().output_text


def ask_anthropic(job: Job) -> str:
    import anthropic

    client = anthropic.Anthropic(api_key="none", base_url=job.url, default_headers={USER: job.user})
    messages: Any = job.messages
    question: Any = {"model": "m", "max_tokens": 1024, "messages": messages}
    if not job.stream:
        return str(client.messages.create(**question).content[0].text)
    with client.messages.stream(**question) as stream:
        return stream.get_final_text()


def ask_gemini(job: Job, *, retries: bool = False) -> str:
    from google import genai
    from google.genai import types

    retry = (
        types.HttpRetryOptions(attempts=3, initial_delay=0.01, max_delay=0.01) if retries else None
    )
    options = types.HttpOptions(base_url=job.url, headers={USER: job.user}, retry_options=retry)
    client = genai.Client(api_key="none", http_options=options)
    roles = {"assistant": "model", "user": "user"}
    contents: Any = [
        {"role": roles[said["role"]], "parts": [{"text": said["content"]}]} for said in job.messages
    ]
    if not job.stream:
        return client.models.generate_content(model="m", contents=contents).text or ""
    return "".join(
        piece.text or ""
        for piece in client.models.generate_content_stream(model="m", contents=contents)
    )


def open_bedrock(url: str, headers: dict[str, str], key: str = "none", **config: Any) -> Any:  # noqa: ANN401  # boto3 is untyped
    import boto3
    from botocore.config import Config

    keys = {"aws_access_key_id": key, "aws_secret_access_key": "none"}
    client: Any = boto3.client(
        "bedrock-runtime",
        endpoint_url=url,
        region_name="us-east-1",
        config=Config(**config),
        **keys,
    )
    client.meta.events.register(
        "before-call", lambda params, **_: params["headers"].update(headers)
    )
    return client


def ask_bedrock(job: Job, *, mode: str = "") -> str:
    client = open_bedrock(job.url, {USER: job.user}, retries={"mode": mode} if mode else None)
    messages = [
        {"role": said["role"], "content": [{"text": said["content"]}]} for said in job.messages
    ]
    if not job.stream:
        return str(
            client.converse(modelId="m", messages=messages)["output"]["message"]["content"][0][
                "text"
            ]
        )
    events = client.converse_stream(modelId="m", messages=messages)["stream"]
    return "".join(
        event["contentBlockDelta"]["delta"]["text"]
        for event in events
        if "contentBlockDelta" in event
    )


def ask_anthropic_bedrock(job: Job) -> str:
    import anthropic

    keys: Any = {"aws_access_key": "none", "aws_secret_key": "none", "aws_region": "us-east-1"}
    client = anthropic.AnthropicBedrock(base_url=job.url, default_headers={USER: job.user}, **keys)
    messages: Any = job.messages
    question: Any = {"model": "m", "max_tokens": 1024, "messages": messages}
    if not job.stream:
        return str(client.messages.create(**question).content[0].text)
    events: Any = client.messages.create(**question, stream=True)
    return "".join(event.delta.text for event in events if event.type == "content_block_delta")


def ask_ollama(job: Job) -> str:
    import ollama

    client = ollama.Client(host=job.url, headers={USER: job.user})
    if not job.stream:
        return client.chat(model="m", messages=job.messages).message.content or ""
    return "".join(
        piece.message.content or ""
        for piece in client.chat(model="m", messages=job.messages, stream=True)
    )


def ask_node(sdk: str, job: Job) -> Reply:
    question = {**job._asdict(), "sdk": sdk}
    process = _start_asking()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(question).encode() + b"\n")
    assert select.select([process.stdout], [], [], 300)[0], f"node does not answer {question}"
    answer = json.loads(process.stdout.readline())
    return (
        Reply(answer["text"])
        if "text" in answer
        else Reply(answer["error"], answer["status"] or -1)
    )


@functools.cache
def _start_asking() -> subprocess.Popen[bytes]:
    """One process for all questions: an SDK takes longer to import than to ask.

    It ends with its stdin.
    """
    command = ["node", "--no-warnings", str(_install_node() / "ask.mjs")]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)


def run_node(script: str, arguments: Sequence[str], given: object) -> dict[str, Any]:
    """Output of a script in `node/`, which gets JSON. Skips the test where there is no node."""
    command = ["node", "--no-warnings", str(_install_node() / script), *arguments]
    printed = subprocess.run(
        command, input=json.dumps(given), capture_output=True, text=True, timeout=300, check=False
    )
    assert printed.returncode == 0, printed.stderr
    answer: dict[str, Any] = json.loads(printed.stdout)
    return answer


@functools.cache
def _install_node() -> Path:
    """The scripts' folder beside their SDKs, installed once for each list of them."""
    source = Path(__file__).parent / "node"
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("NODE IS MISSING: the SDKs of JavaScript are not tested")
    listed = (source / "package.json").read_bytes()
    folder = Path(sys.prefix) / f"node-{hashlib.sha256(listed).hexdigest()[:16]}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.copytree(source, folder, dirs_exist_ok=True)
        if not (folder / "installed").exists():
            command = [
                "npm",
                "install",
                "--no-audit",
                "--no-fund",
                "--ignore-scripts",
                "--prefix",
                str(folder),
            ]
            made = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if made.returncode:
                pytest.skip(
                    "THE SDKS OF JAVASCRIPT CANNOT BE INSTALLED, and are not tested: "
                    f"{made.stderr[-500:]}"
                )
            (folder / "installed").touch()
    return folder


def ask_python(ask: Callable[[Job], str], job: Job) -> Reply:
    import anthropic
    import openai
    from botocore.exceptions import ClientError
    from google.genai.errors import APIError

    try:
        return Reply(ask(job))
    except openai.APIStatusError as error:
        return Reply(str(error), error.status_code)
    except anthropic.APIStatusError as error:
        return Reply(str(error), error.status_code)
    except APIError as error:
        return Reply(str(error), error.code)
    except ClientError as error:
        return Reply(str(error), error.response["ResponseMetadata"]["HTTPStatusCode"])


Ask: TypeAlias = Callable[[Job], Reply]

PYTHON: dict[str, Ask] = {
    "chat": partial(ask_python, ask_chat),
    "responses": partial(ask_python, ask_responses),
    "anthropic": partial(ask_python, ask_anthropic),
    "gemini": partial(ask_python, ask_gemini),
    "bedrock": partial(ask_python, ask_bedrock),
}
NODE: dict[str, Ask] = {
    f"node-{sdk}": partial(ask_node, sdk)
    for sdk in (
        "openai-chat",
        "openai-responses",
        "anthropic",
        "vercel-openai",
        "vercel-anthropic",
        "vercel-google",
        "aws",
    )
}
SDKS: dict[str, Ask] = PYTHON | NODE


# --- those that name the model in the path

_QUESTION: Any = [{"role": "user", "content": "x"}]

# Asks one question; takes the URL, the model and more headers.
AskModel: TypeAlias = Callable[[str, str, dict[str, str]], object]


class _Anonymous(Credentials):
    valid = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # google-auth has few types
        self.token = "none"

    def refresh(self, request: object) -> None:
        pass


def _ask_model_bedrock(url: str, model: str, headers: dict[str, str], *, call: str) -> object:
    client = open_bedrock(url, headers, retries={"total_max_attempts": 1})
    asked = (
        {"body": b"{}"}
        if call.startswith("invoke")
        else {"messages": [{"role": "user", "content": [{"text": "x"}]}]}
    )
    return getattr(client, call)(modelId=model, **asked)


def _ask_model_anthropic_bedrock(url: str, model: str, headers: dict[str, str]) -> object:
    import anthropic

    keys: Any = {"aws_access_key": "none", "aws_secret_key": "none", "aws_region": "us-east-1"}
    client = anthropic.AnthropicBedrock(
        base_url=url, max_retries=0, default_headers=headers, **keys
    )
    return client.messages.create(model=model, max_tokens=5, messages=_QUESTION)


def _ask_model_anthropic_vertex(
    url: str, model: str, headers: dict[str, str], *, call: str = ""
) -> object:
    import anthropic

    keys: Any = {"access_token": "none", "project_id": "p", "region": "us-east5"}
    client = anthropic.AnthropicVertex(base_url=url, max_retries=0, default_headers=headers, **keys)
    if call == "count":
        return client.messages.count_tokens(model=model, messages=_QUESTION)
    return client.messages.create(
        model=model, max_tokens=5, messages=_QUESTION, stream=call == "stream"
    )


def _ask_model_azure(
    url: str, model: str, headers: dict[str, str], *, deployment: str | None = None
) -> object:
    import openai

    where: Any = {
        "azure_endpoint": url,
        "azure_deployment": deployment,
        "api_version": "2024-10-21",
    }
    client = openai.AzureOpenAI(api_key="none", max_retries=0, default_headers=headers, **where)
    return client.chat.completions.create(model=model, messages=_QUESTION)


def _ask_model_openai(url: str, model: str, headers: dict[str, str]) -> object:
    import openai

    client = openai.OpenAI(
        api_key="none", base_url=f"{url}/v1", max_retries=0, default_headers=headers
    )
    return client.chat.completions.create(model=model, messages=_QUESTION)


def _ask_model_google(
    url: str, model: str, headers: dict[str, str], *, vertex: bool = False, stream: bool = False
) -> object:
    from google import genai
    from google.genai import types

    on_vertex = {
        "vertexai": True,
        "project": "p",
        "location": "us-central1",
        "credentials": _Anonymous(),
    }
    where: Any = on_vertex if vertex else {"api_key": "none"}
    client = genai.Client(http_options=types.HttpOptions(base_url=url, headers=headers), **where)
    if stream:
        return list(client.models.generate_content_stream(model=model, contents="x"))
    return client.models.generate_content(model=model, contents="x")


MODEL_SDKS: dict[str, AskModel] = {
    **{
        call: partial(_ask_model_bedrock, call=call)
        for call in (
            "converse",
            "converse_stream",
            "invoke_model",
            "invoke_model_with_response_stream",
        )
    },
    "anthropic-bedrock": _ask_model_anthropic_bedrock,
    "anthropic-vertex": _ask_model_anthropic_vertex,
    "anthropic-vertex-stream": partial(_ask_model_anthropic_vertex, call="stream"),
    "anthropic-vertex-count": partial(_ask_model_anthropic_vertex, call="count"),
    "azure": _ask_model_azure,
    "azure-deployment": partial(_ask_model_azure, deployment="production"),
    "openai": _ask_model_openai,
    "gemini": _ask_model_google,
    "gemini-stream": partial(_ask_model_google, stream=True),
    "vertex": partial(_ask_model_google, vertex=True),
}
