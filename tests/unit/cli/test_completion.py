"""The completion of commands and flags, in the shells that are installed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from extproc.cli.commands import COMMANDS
from tests.support.command import Run

SHELLS = ("bash", "zsh", "fish")


def make_script(shell: str, capsys: pytest.CaptureFixture[str], folder: Path) -> Path:
    file = folder / f"loopguard.{shell}"
    file.write_text(Run(capsys, "completion", shell).out)
    return file


def run_shell(*command: str | Path, folder: Path | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, cwd=folder
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_script_has_every_command(
    shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = make_script(shell, capsys, tmp_path)

    text = script.read_text()
    assert [command for command in COMMANDS if command not in text] == []
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: whether it can load the script is NOT tested")
    run_shell(shell, "-n", script)


@pytest.mark.slow
def test_bash_completes_commands_flags_choices_and_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    program = f"""
source {make_script("bash", capsys, tmp_path)}
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${{#COMP_LINE}}
function=$(complete -p loopguard | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function loopguard "${{COMP_WORDS[-1]}}" "${{COMP_WORDS[-2]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    (tmp_path / "policies.json").write_text("{}")
    expected = {
        "co": {"completion"},
        "completion ": {*SHELLS},
        "canary s": {"status"},
        "top --sort s": {"spared"},
        "serve --policy pol": {"policies.json"},
    }
    for command in COMMANDS:
        page = Run(capsys, command, "--help").out
        expected[f"{command} --"] = set(
            re.findall(r"^  (?:-\w[^-\n]*, )?(--[\w-]+)", page, re.MULTILINE)
        )

    def complete(line: str) -> set[str]:
        words = ["loopguard", *line.split(" ")]
        return {
            word.strip()
            for word in run_shell(
                "bash", "-c", program, "bash", *words, folder=tmp_path
            ).splitlines()
        } - {""}

    assert complete("") >= {*COMMANDS}
    assert {line: complete(line) for line in expected} == expected
