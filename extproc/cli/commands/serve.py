"""`loopguard serve`: the external processor."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal

from extproc import settings
from extproc.cli.commands import check_paths
from extproc.errors import UsageError
from extproc.logs import setup

_LOG = logging.getLogger("loopguard")

HELP = "run the external processor"
EXAMPLES = """examples:
  loopguard serve
  loopguard serve --policy policies/
  loopguard serve --policy bundle.json --listen 0.0.0.0:50051 --log-format json
  LOOPGUARD_POLICY=/etc/loopguard loopguard serve --shadow

Without a policy, the preset `agents` watches in shadow mode: `loopguard top` shows loops, and no request is touched.

signals: SIGHUP reloads the policies (so does any change of the files), SIGTERM drains, Ctrl-C drains without the delay"""

add_flags = settings.add_flags


def run(options: argparse.Namespace) -> int:
    """Serve until a signal ends it; returns the exit code."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it would end a process that cannot reload yet
    hush_grpc()
    import uvloop  # noqa: PLC0415  # only the server needs it

    from extproc.server import Server  # noqa: PLC0415  # the server's parts take 0.3 s to import; other commands need none

    chosen = settings.read_settings(vars(options), os.environ)
    variable = f"{settings.ENV_PREFIX}POLICY"
    if not chosen.policy and variable in os.environ:  # such as that of a template that lacks a value
        raise UsageError(f"{variable} is empty; name policy files or directories, or unset it to watch without a policy")
    check_paths(chosen.policy)
    setup(chosen.log_format, chosen.log_level)
    for warning in settings.find_unknown(os.environ):
        _LOG.warning(warning)

    async def serve() -> None:
        await Server(chosen).run()

    # Our own transport gains from uvloop; grpcio brings its own poller and does not.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if chosen.transport == "fast" else None) as runner:
        runner.run(serve())
    return 0


def hush_grpc() -> None:
    """Before grpc is imported: its core would write lines of its own form to stderr, about what we report ourselves."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
