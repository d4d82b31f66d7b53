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
    def __init__(
        self,
        folder: Path,
        capsys: pytest.CaptureFixture[str],
        log: bytes | Mapping[str, bytes],
        *flags: str,
        policies: object = None,
    ) -> None:
        files = log if isinstance(log, Mapping) else {"access.log": log}
        for name, data in files.items():
            (folder / name).write_bytes(data)
        document = policies or bundle(policy("p", ANY, **USER))
        (folder / "policies.json").write_text(json.dumps(document))
        arguments = [
            "--policy",
            str(folder / "policies.json"),
            "--json",
            *flags,
            *(str(folder / name) for name in files),
        ]
        self.code = main(["replay", *arguments])
        printed = capsys.readouterr()
        self.error = printed.err.replace(f"{folder}/", "")
        self.document: dict[str, Any] = json.loads(printed.out) if printed.out else {}

    def find(self, name: str = "p") -> dict[str, Any]:
        return next(item for item in self.document["policies"] if item["policy"] == name)

    def list_problems(self) -> dict[str, int]:
        return {
            kind: problem["lines"] for kind, problem in self.document["log"]["problems"].items()
        }
