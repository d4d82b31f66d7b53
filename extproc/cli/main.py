"""The `loopguard` command: runs a subcommand and reports errors, each in one line."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from typing import NoReturn

from extproc.build import describe_build
from extproc.cli.commands import COMMANDS
from extproc.errors import BundleErrors, LoopguardError, UsageError
from extproc.logs import escape_controls
from extproc.request.document import limit_integers

_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0 success, 1 failure, 2 usage error."""
    limit_integers()
    try:
        options = _read(sys.argv[1:] if arguments is None else arguments)
        return int(options.run(options) or 0)
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
    return f"loopguard {version('extproc-loopguard')} ({describe_build()})"


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line; argparse would print the usage of twenty flags before it."""

    def error(self, message: str) -> NoReturn:
        given = _CHOICE.search(message)
        hint = _suggest(given[1], re.findall(r"[\w-]+", given[2])) if given is not None else ""
        raise UsageError(f"{message}{hint}; see '{self.prog} --help'")


def _read(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser(arguments)
    try:
        options, rest = parser.parse_known_args(arguments)
    except UsageError:
        if (unknown := _explain_flags(parser, arguments)) is None:
            raise
        raise UsageError(unknown) from None  # the missing argument may be a misspelt one
    if rest:  # argparse would point to the help of all commands
        message = (
            f"unrecognized arguments: {' '.join(rest)}; see "
            f"'{_name_parser(options.command)} --help'"
        )
        raise UsageError(_explain_flags(parser, arguments) or message)
    return options


def _explain_flags(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> str | None:
    """The error about misspelt flags, with a suggestion; None if no flag resembles a known one."""
    known: list[str] = []
    waiting, name = [parser], ""
    for own in waiting:  # grows
        for action in own._actions:  # noqa: SLF001  # argparse has no public way
            known += action.option_strings
            if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001  # as above
                below = [
                    (word, action.choices[word]) for word in arguments if word in action.choices
                ][:1]
                waiting += [each for _, each in below]
                name = name or "".join([word for word, _ in below])
    given = [
        each.partition("=")[0]
        for each in arguments
        if each.startswith("--") and len(each) > 2  # noqa: PLR2004  # dashes
    ]
    unknown = [flag for flag in given if flag not in known]
    hint = next((hint for flag in unknown if (hint := _suggest(flag, known))), "")
    return (
        f"unrecognized arguments: {' '.join(unknown)}{hint}; see '{_name_parser(name)} --help'"
        if hint
        else None
    )


def _name_parser(command: str | None) -> str:
    return f"loopguard {command}" if command else "loopguard"


def _suggest(word: str, known: Sequence[str]) -> str:
    bare = {each.lstrip("-"): each for each in known}  # equal dashes would count as similarity
    close = get_close_matches(word.lstrip("-"), bare, 1)
    return f"; did you mean {bare[close[0]]}?" if close else ""


def make_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Make a parser for the requested command, else for all of them.

    Some commands take long to import.
    """
    parser = _Parser(
        prog="loopguard",
        description="Stops runaway agents at the gateway: an Envoy external processor.",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # the version is one line
    )
    parser.add_argument("--version", action="version", version=describe_version())
    parser.set_defaults(run=lambda _: parser.print_help())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
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
