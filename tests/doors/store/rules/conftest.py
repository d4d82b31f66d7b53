"""Every store, with the servers that it needs: one body of tests for each rule drives them all."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import pytest

from tests.support.servers import REDIS, Driver, cluster, server


def _on_one() -> Iterator[str]:
    with server() as one:
        yield f"redis://127.0.0.1:{one.port}"


def _on_a_cluster() -> Iterator[str]:
    with cluster(fails_over=False) as nodes:
        yield "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes[:2])


def _on_debians() -> Iterator[str]:
    if REDIS is None:
        pytest.skip("Debian's redis-server is not installed: counted on Valkey alone")
    with server(binary=REDIS) as one:
        yield f"redis://127.0.0.1:{one.port}"


def _by_the_library() -> Iterator[str]:
    for url in _on_one():
        yield f"{url}?client=redis-py"


SERVERS: dict[str, Callable[[], Iterator[str]]] = {
    "valkey": _on_one,
    "redis": _on_debians,
    "redis-py": _by_the_library,
    "cluster": _on_a_cluster,
}
"""Servers, and ways to them, by name."""

_LANGUAGES = ("memory", "valkey")
"""Stores whose rules are written in Python, and in Lua: each rule has one set of cases for both."""


@pytest.fixture(scope="session")
def drivers() -> Iterator[Callable[[str], Driver]]:
    with ExitStack() as stack:

        @cache
        def start(name: str) -> Driver:
            url = (
                stack.enter_context(contextmanager(SERVERS[name])())
                if name in SERVERS
                else f"{name}://"
            )
            return stack.enter_context(Driver(url))

        yield start


@pytest.fixture(scope="module", params=_LANGUAGES)
def opened(request: pytest.FixtureRequest, drivers: Callable[[str], Driver]) -> Driver:
    return drivers(request.param)


@pytest.fixture
def store(opened: Driver) -> Driver:
    return opened.fresh()
