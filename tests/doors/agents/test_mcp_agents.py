"""Agents that call tools over HTTP, with real MCP SDKs on both sides of Envoy and Loopguard."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import uvicorn

from tests.support.documents import bundle, policy
from tests.support.harness import PATIENCE, Stack, eventually, stack
from tests.support.servers import free_port

POLICIES = bundle(
    policy(
        "tools",
        {"pathPrefix": "/"},
        similarity="mcp",
        limit_keys=["header:x-user-id"],
        tools={
            "wait*": {"allow": True},
            "build": {"threshold": 2, "reason": "A build takes an hour."},
        },
    )
)
THRESHOLD = 3

served: Counter[str] = Counter()  # how often each query reached a server


def search(query: str, limit: int = 10) -> str:
    served[query] += 1
    return f"{limit} results for {query}"


def build(target: str) -> str:
    return f"started {target}"


def wait_for_build(seconds: int) -> str:
    return f"waited {seconds}"


TOOLS: list[Callable[..., str]] = [search, build, wait_for_build]


def make_app(kind: str) -> Any:  # noqa: ANN401  # an ASGI application
    """The server of either SDK, with the same tools."""
    import fastmcp
    from mcp.server import MCPServer

    server = MCPServer("tools") if kind == "mcp" else fastmcp.FastMCP("tools")
    for tool in TOOLS:
        server.tool()(tool)
    return server.streamable_http_app() if isinstance(server, MCPServer) else server.http_app()


@contextmanager
def run_server(kind: str) -> Iterator[str]:
    port = free_port()
    config = uvicorn.Config(
        make_app(kind), port=port, log_level="error", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started, "the server's start")
        yield f"127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)


@pytest.fixture(scope="module")
def gates() -> Iterator[dict[str, Stack]]:
    with ExitStack() as opened:
        yield {
            kind: opened.enter_context(
                stack(
                    POLICIES,
                    "--transport",
                    transport,
                    upstream=opened.enter_context(run_server(kind)),
                )
            )
            for kind, transport in (("mcp", "fast"), ("fastmcp", "grpcio"))
        }


class Result(NamedTuple):
    """The result of a call."""

    failed: bool
    text: str


class Session(NamedTuple):
    """What a client of either SDK can do."""

    call: Callable[[str, dict[str, Any]], Awaitable[Result]]
    list_tools: Callable[[], Awaitable[list[str]]]


@asynccontextmanager
async def connect_mcp(
    url: str, headers: Mapping[str, str], mode: str = "auto"
) -> AsyncIterator[Session]:
    """The official SDK, with or without a handshake."""
    import httpx2
    import mcp
    from mcp.client.streamable_http import streamable_http_client

    async def call(tool: str, arguments: dict[str, Any]) -> Result:
        result = await client.call_tool(tool, arguments)
        # All of it is text
        return Result(bool(result.is_error), result.content[0].text)  # type: ignore[union-attr]

    async def list_tools() -> list[str]:
        return [tool.name for tool in (await client.list_tools()).tools]

    async with (
        httpx2.AsyncClient(headers=dict(headers)) as http,
        mcp.Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        yield Session(call, list_tools)


@asynccontextmanager
async def connect_fastmcp(url: str, headers: Mapping[str, str]) -> AsyncIterator[Session]:
    import fastmcp
    from fastmcp.client.transports import StreamableHttpTransport

    async def call(tool: str, arguments: dict[str, Any]) -> Result:
        result = await client.call_tool(tool, arguments, raise_on_error=False)
        return Result(result.is_error, result.content[0].text)

    async def list_tools() -> list[str]:
        return [tool.name for tool in await client.list_tools()]

    async with fastmcp.Client(StreamableHttpTransport(url, headers=dict(headers))) as client:
        yield Session(call, list_tools)


CLIENTS: dict[str, Callable[[str, Mapping[str, str]], AbstractAsyncContextManager[Session]]] = {
    "mcp": connect_mcp,
    "mcp-handshake": partial(connect_mcp, mode="legacy"),
    "fastmcp": connect_fastmcp,
}


@pytest.fixture(
    params=[("mcp", "mcp-handshake"), ("fastmcp", "mcp"), ("fastmcp", "fastmcp")], ids="-".join
)
def use(
    request: pytest.FixtureRequest, gates: dict[str, Stack], user: dict[str, str]
) -> Callable[..., list[Result]]:
    """Calls tools in one session, and lists the tools before and after."""
    server, client = request.param

    async def work(calls: Sequence[tuple[str, dict[str, Any]]]) -> list[Result]:
        async with CLIENTS[client](
            f"http://127.0.0.1:{gates[server].envoy.port}/mcp", user
        ) as session:
            listed = await session.list_tools()
            results = [await session.call(*call) for call in calls]
            assert await session.list_tools() == listed == ["search", "build", "wait_for_build"]
            return results

    return lambda *calls: asyncio.run(work(calls))


def test_refusal_is_a_tool_result_within_the_session(
    use: Callable[..., list[Result]], user: dict[str, str]
) -> None:
    query = f"looping {user['x-user-id']}"

    *results, after = use(
        *[("search", {"query": query})] * (THRESHOLD + 1), ("search", {"query": query, "limit": 5})
    )

    assert [result.failed for result in results] == [False] * (THRESHOLD - 1) + [True, True]
    assert results[-2].text.startswith(
        "Loop detected: search has been called 3 times with the same arguments within "
    )
    assert after == Result(failed=False, text=f"5 results for {query}")
    assert served[query] == THRESHOLD


def test_other_calls_and_requests_are_never_refused(
    gates: dict[str, Stack], use: Callable[..., list[Result]]
) -> None:
    def count_uncounted() -> float:
        return sum(
            each.loopguard.metric("uncounted_total", policy="tools", reason="not_a_call")
            for each in gates.values()
        )

    before = count_uncounted()
    for number in range(THRESHOLD + 1):
        assert use(("search", {"query": f"page {number}"})) == [
            Result(failed=False, text=f"10 results for page {number}")
        ]

    assert count_uncounted() >= before + 2 * (THRESHOLD + 1)


def test_new_session_does_not_reset_the_count(use: Callable[..., list[Result]]) -> None:
    failed = [use(("search", {"query": "again"}))[0].failed for _ in range(THRESHOLD)]

    assert failed == [False] * (THRESHOLD - 1) + [True]


def test_tools_have_their_own_limits(use: Callable[..., list[Result]]) -> None:
    *waits, built, refused = use(
        *[("wait_for_build", {"seconds": 5})] * 2 * THRESHOLD, *[("build", {"target": "all"})] * 2
    )

    assert [result.failed for result in (*waits, built, refused)] == [False] * (
        2 * THRESHOLD + 1
    ) + [True]
    assert "has been called 2 times" in refused.text
    assert "and was refused. A build takes an hour. Repeating it" in refused.text


@pytest.mark.parametrize("method", ["message/send", "SendMessage"])
def test_message_to_another_agent_is_refused_with_an_error(
    gates: dict[str, Stack], user: dict[str, str], method: str
) -> None:
    for number in range(THRESHOLD):
        parts = [{"kind": "text", "text": "Are you done?", "metadata": {"at": number}}]
        message = {
            "messageId": f"m-{number}",
            "contextId": f"c-{number}",
            "role": "user",
            "parts": parts,
        }
        request = {
            "jsonrpc": "2.0",
            "id": f"id-{number}",
            "method": method,
            "params": {"message": message},
        }
        answer = gates["mcp"].post(
            "/a2a",
            request,
            {"content-type": "application/json", "accept": "application/json", **user},
        )

    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    said = answer.json()["error"]["message"]
    assert answer.json() == {
        "jsonrpc": "2.0",
        "id": "id-2",
        "error": {"code": -32000, "message": said},
    }
    assert said.startswith("Loop detected: this same message has been sent 3 times within ")


def test_client_of_event_streams_gets_an_event(
    gates: dict[str, Stack], user: dict[str, str]
) -> None:
    request = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "search"}}
    for _ in range(THRESHOLD):
        answer = gates["mcp"].post(
            "/events",
            request,
            {"content-type": "application/json", "accept": "text/event-stream", **user},
        )

    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
    event, data, *end = answer.body.decode().split("\n")
    assert (event, end) == ("event: message", ["", ""])
    assert json.loads(data.removeprefix("data: "))["result"]["isError"] is True
    assert (
        gates["mcp"].envoy.logged("/events", status=200, details="loop_detected")["loop_policy"]
        == "tools"
    )
