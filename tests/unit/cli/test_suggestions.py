"""What the command says to someone who does not know it yet: its help, and what a misspelt word is like."""

from __future__ import annotations

import pytest

from extproc.cli.main import main


@pytest.mark.parametrize(("arguments", "shown"), [([], "usage: loopguard "), (["canary"], "usage: loopguard canary ")])
def test_group_of_commands_alone_prints_its_help(capsys: pytest.CaptureFixture[str], arguments: list[str], shown: str) -> None:
    """It is no error, and nothing but the help."""
    code = main(arguments)

    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert out.startswith(shown)
    assert "--help" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tpo"], "; did you mean top?; see 'loopguard --help'"),
        (["check-envoi"], "; did you mean check-envoy?; see 'loopguard --help'"),
        (["canary", "statsu"], "; did you mean status?; see 'loopguard canary --help'"),
        (["top", "--sort", "costs"], "; did you mean cost?; see 'loopguard top --help'"),
        (["init", "--preset", "agent"], "; did you mean agents?; see 'loopguard init --help'"),
        (["top", "--pollicy", "p"], "unrecognized arguments: --pollicy; did you mean --policy?; see 'loopguard top --help'"),
        (["top", "--polcy=p"], "unrecognized arguments: --polcy; did you mean --policy?; see 'loopguard top --help'"),
        (
            ["explain", "--polcy", "p.json", "h/"],
            "unrecognized arguments: --polcy; did you mean --policy?; see 'loopguard explain --help'",
        ),
        (
            ["canary", "status", "--polcy", "p"],
            "unrecognized arguments: --polcy; did you mean --policy?; see 'loopguard canary --help'",
        ),
        (["--versoin"], "unrecognized arguments: --versoin; did you mean --version?; see 'loopguard --help'"),
    ],
)
def test_misspelt_words_are_answered_with_known_ones(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    """Commands, flags, values of flags, and flags without which something required is missing."""
    code = main(arguments)

    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.endswith(f"{said}\n")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [["frobnicate"], ["top", "--frobnicate"], ["explain", "h/"], ["top", "--sort", "frobnicate"], ["schema", "--", "--sort"]],
)
def test_words_that_are_like_none_get_no_suggestion(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """A wrong one would mislead."""
    assert main(arguments) == 2
    assert "did you mean" not in capsys.readouterr().err
