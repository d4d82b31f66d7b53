"""The completion of commands and flags, in the shells that are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from extproc.cli.commands import COMMANDS
from extproc.cli.main import main, make_parser

SHELLS = ("bash", "zsh", "fish")


def make_script(shell: str, capsys: pytest.CaptureFixture[str], folder: Path) -> Path:
    """The script as a file."""
    assert main(["completion", shell]) == 0
    file = folder / f"loopguard.{shell}"
    file.write_text(capsys.readouterr().out)
    return file


def list_flags(command: str) -> set[str]:
    """The long flags of a command."""
    choices = make_parser(())._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    return {flag for action in choices[command]._actions for flag in action.option_strings if flag.startswith("--")}  # type: ignore[index]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_every_command(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each shell's own syntax, which that shell takes if it is installed."""
    script = make_script(shell, capsys, tmp_path)

    text = script.read_text()
    assert [command for command in COMMANDS if command not in text] == []
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: whether it can load the script is NOT tested")
    done = subprocess.run([shell, "-n", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def complete(script: Path, folder: Path, *words: str) -> set[str]:
    """What bash offers for the last of these words."""
    program = f"""
source {script}
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${{#COMP_LINE}}
function=$(complete -p loopguard | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function loopguard "${{COMP_WORDS[-1]}}" "${{COMP_WORDS[-2]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    command = ["bash", "-c", program, "bash", "loopguard", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=folder)
    assert done.stderr == ""
    return {line.strip() for line in done.stdout.splitlines() if line.strip()}


@pytest.mark.slow
def test_bash_completes_commands_flags_choices_and_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As somebody types them."""
    script = make_script("bash", capsys, tmp_path)
    (tmp_path / "policies.json").write_text("{}")

    assert complete(script, tmp_path, "") >= {*COMMANDS}
    assert complete(script, tmp_path, "co") == {"completion"}
    assert complete(script, tmp_path, "completion", "") == {*SHELLS}
    assert complete(script, tmp_path, "canary", "s") == {"status"}
    for command in COMMANDS:
        assert complete(script, tmp_path, command, "--") == list_flags(command), command
    assert complete(script, tmp_path, "top", "--sort", "s") == {"spared"}
    assert complete(script, tmp_path, "serve", "--policy", "pol") == {"policies.json"}


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed: what it completes is NOT tested")
def test_fish_completes_commands_flags_and_choices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With what each is for."""
    script = make_script("fish", capsys, tmp_path)
    lines = "; ".join(f"complete -C '{line}'" for line in ("loopguard to", "loopguard top --on", "loopguard top --sort s"))

    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source {script}; {lines}"], capture_output=True, text=True, check=True, timeout=60
    )

    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["top", "--once", "spared"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed: whether it completes is NOT tested")
def test_zsh_finds_the_script_in_its_path(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Under the name that the examples give it."""
    make_script("zsh", capsys, tmp_path).rename(tmp_path / "_loopguard")
    program = f"fpath=({tmp_path} $fpath); autoload -U compinit; compinit -u -d {tmp_path}/dump; print -r -- $_comps[loopguard]"

    done = subprocess.run(["zsh", "-fc", program], capture_output=True, text=True, check=True, timeout=60)

    assert "_loopguard" in done.stdout
