"""`loopguard serve`: runs the external processor."""

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

Without a policy, the preset `agents` watches in shadow mode: `loopguard top` shows loops,
and no request is changed.

signals: SIGHUP reloads the policies (so does any change of the files), SIGTERM drains,
Ctrl-C drains without the delay"""

add_flags = settings.add_flags


def run(options: argparse.Namespace) -> int:
    # Until the server handles it; by default it ends the process
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    silence_grpc()
    import uvloop  # noqa: PLC0415  # only the server needs it

    # Takes 0.3 s to import; other commands do not need it
    from extproc.server import Server  # noqa: PLC0415

    chosen = settings.read_settings(vars(options), os.environ)
    variable = f"{settings.ENV_PREFIX}POLICY"
    if not chosen.policy and variable in os.environ:  # such as a template without a value
        raise UsageError(
            f"{variable} is empty; name policy files or directories, or unset it to watch without "
            "a policy"
        )
    check_paths(chosen.policy)
    setup(chosen.log_format, chosen.log_level)
    for warning in settings.find_unknown(os.environ):
        _LOG.warning(warning)

    async def serve() -> None:
        await Server(chosen).run()

    # The fast transport is faster with uvloop; grpcio has its own poller.
    with asyncio.Runner(
        loop_factory=uvloop.new_event_loop if chosen.transport == "fast" else None
    ) as runner:
        runner.run(serve())
    return 0


def silence_grpc() -> None:
    """Silence grpc before its import: its core would log errors that Loopguard reports itself."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
