"""Coroutine tests, on the event loop of the fixture `runner` or on a plain one."""

import asyncio
import inspect
from collections.abc import Iterator

import pytest

from tests.support.transport import LOOPS, TRANSPORTS


@pytest.fixture(params=LOOPS)
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=LOOPS[request.param]) as made:
        yield made


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    test, found = pyfuncitem.function, pyfuncitem.funcargs
    if not inspect.iscoroutinefunction(test):
        return None
    runner = found.get("runner")
    run = runner.run if isinstance(runner, asyncio.Runner) else asyncio.run
    run(test(**{name: found[name] for name in inspect.signature(test).parameters}))
    return True
