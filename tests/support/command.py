"""The `loopguard` command, run in this process."""

import json
import re
from collections.abc import Container, Sequence
from pathlib import Path

import pytest

from extproc.cli.main import main
from tests.support.bundles import RULE
from tests.support.documents import policy


class Run:
    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
        capsys.readouterr()
        try:
            self.code: object = main(arguments)
        except SystemExit as leaving:
            self.code = leaving.code or 0
        self.out, self.err = capsys.readouterr()

    @property
    def complaint(self) -> str:
        (line,) = self.err.splitlines()
        return line


def fits(shown: str | None, wanted: str | None) -> bool:
    """Whether a text equals the wanted one, in which `…` stands for any text. None is no text."""
    if shown is None or wanted is None:
        return shown is wanted
    return re.fullmatch(".*".join(map(re.escape, wanted.split("…"))), shown, re.DOTALL) is not None


SAID = {"missing_descriptor": "require_one"}
GOOD = policy(
    "p", {"pathExact": "/v1/chat/completions"}, limit_keys=["jwt:org_id", "jwt:user_id"], **SAID
)
WITH_RULES = policy("p", {"pathExact": "/a"}, limit_keys=["jwt:org_id"], **SAID)
WITH_RULES["spec"]["rules"] = [RULE | {"name": "per-org", "limit_keys": ["ip:country"]}]
NOT_ENFORCED = (
    "/policies/0/spec/rules/0/limit_keys/0: the descriptor ip:country cannot be derived by "
    "Loopguard, so the rule per-org "
    "never applies; use ip:address or a header that your proxy sets, such as header:x-country"
)


def written(file: Path, document: object) -> str:
    file.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
    return str(file)


def find_missing(text: Container[str], *parts: str) -> list[str]:
    return [part for part in parts if part not in text]


def find_misfits(lines: Sequence[str], *wanted: str) -> list[str]:
    """The first lines that do not fit, in the sense of `fits`."""
    found = zip(lines[: len(wanted)], wanted, strict=True)
    return [line for line, each in found if not fits(line, each)]
