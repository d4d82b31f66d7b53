"""`loopguard completion`: prints a shell's completion script."""

from __future__ import annotations

import argparse

HELP = "print a script that completes commands and flags in a shell"
EXAMPLES = """examples:
  loopguard completion fish | source                        # in config.fish
  loopguard completion zsh > "${fpath[1]}/_loopguard"       # once
  eval "$(loopguard completion bash)"                       # in ~/.bashrc"""

_SHELLS = ("bash", "zsh", "fish")
_FILES = {"PATH": "FILE", "FILE": "FILE", "DIR": "DIRECTORY"}
"""Metavariables of files and folders, with shtab's name for their kind."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS, help="the shell")


def run(options: argparse.Namespace) -> int:
    import shtab  # noqa: PLC0415  # only this command needs it

    from extproc.cli.main import make_parser  # noqa: PLC0415  # it imports the commands

    parser = make_parser(())
    for command in _list_parsers(parser):
        for action in command._actions:  # noqa: SLF001  # argparse has no public way
            if isinstance(action.metavar, str) and action.metavar in _FILES:
                action.complete = getattr(shtab, _FILES[action.metavar])  # type: ignore[attr-defined]  # shtab's attribute
    print(shtab.complete(parser, shell=options.shell))
    return 0


def _list_parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    found = [parser]
    for action in parser._actions:  # noqa: SLF001  # as above
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001  # as above
            found += [each for below in action.choices.values() for each in _list_parsers(below)]
    return found
