"""The command `replay` on logs and policies of a test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.main import main
from tests.support.access_logs import USER
from tests.support.documents import bundle, policy
from tests.support.engine import ANY


class Replayed:
    """One run of the command: exit code, JSON document, and what was said on stderr."""

    def __init__(
        self,
        folder: Path,
        capsys: pytest.CaptureFixture[str],
        log: bytes | Mapping[str, bytes],
        *flags: str,
        policies: object = None,
    ) -> None:
        """Write the log, or several, and replay them."""
        files = log if isinstance(log, Mapping) else {"access.log": log}
        for name, data in files.items():
            (folder / name).write_bytes(data)
        document = policies or bundle(policy("p", ANY, **USER))
        (folder / "policies.json").write_text(json.dumps(document))
        arguments = ["--policy", str(folder / "policies.json"), "--json", *flags, *(str(folder / name) for name in files)]
        self.code = main(["replay", *arguments])
        printed = capsys.readouterr()
        self.error = printed.err.replace(f"{folder}/", "")
        self.document: dict[str, Any] = json.loads(printed.out) if printed.out else {}

    def find(self, name: str = "p") -> dict[str, Any]:
        """What became of a policy."""
        return next(item for item in self.document["policies"] if item["policy"] == name)

    def list_problems(self) -> dict[str, int]:
        """How many lines had which problem."""
        return {kind: problem["lines"] for kind, problem in self.document["log"]["problems"].items()}
