"""The `loopguard` command: runs a subcommand, and reports an error in one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import NoReturn

from extproc import bounded
from extproc.cli.commands import COMMANDS
from extproc.errors import BundleErrors, LoopguardError, UsageError
from extproc.logs import escape_controls
from extproc.request.document import limit_integers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0 for success, 1 for failure, 2 for a usage error."""
    limit_integers()
    try:
        options = _read(sys.argv[1:] if arguments is None else arguments)
        return int(options.run(options))
    except UsageError as error:
        return _complain(str(error), 2)
    except BundleErrors as error:
        for problem in error.errors:
            print(escape_controls(str(problem)), file=sys.stderr)
        return 1
    except LoopguardError as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `loopguard schema | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _complain(message: str, code: int) -> int:
    print(escape_controls(f"loopguard: {message}"), file=sys.stderr)
    return code


def describe_version() -> str:
    """The distribution's version, and whether the hot path is compiled or plain Python."""
    made = "pure Python" if bounded.__file__.endswith(".py") else "compiled"
    return f"loopguard {version('extproc-loopguard')} ({made})"


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage of twenty flags before it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see '{self.prog} --help'")


def _read(arguments: Sequence[str]) -> argparse.Namespace:
    options, rest = make_parser(arguments).parse_known_args(arguments)
    if rest:  # the parser itself would point to the help of all commands
        raise UsageError(f"unrecognized arguments: {' '.join(rest)}; see 'loopguard {options.command} --help'")
    return options


def make_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Make a parser for the requested command, or for all of them: some take long to import."""
    parser = _Parser(prog="loopguard", description="Stops runaway agents at the gateway: an Envoy external processor.")
    parser.add_argument("--version", action="version", version=describe_version())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in [name for name in COMMANDS if name in arguments[:1]] or COMMANDS:
        command = import_module(f"extproc.cli.commands.{name.replace('-', '_')}")
        made = commands.add_parser(
            name,
            help=command.HELP,
            description=f"{command.HELP[0].upper()}{command.HELP[1:]}.",
            epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # a misspelt flag is an error, not another flag
        )
        command.add_flags(made)
        made.set_defaults(run=command.run)
    return parser
