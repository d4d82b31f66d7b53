"""Keeps a person's answers about samples in a file, so that no sample is asked about again."""
# interpreted: tells operators, not requests

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from extproc.errors import LoopguardError

RIGHT, WRONG, UNSURE = ANSWERS = ("right", "wrong", "unsure")


class ReviewTally:
    """Answers by policy and sample."""

    def __init__(self, path: Path) -> None:
        """Read earlier answers; raises LoopguardError if the file cannot be read, or has other content."""
        self._path = path
        self._answers: dict[str, dict[str, str]] = _read_answers(path)

    def find(self, sample: dict[str, Any]) -> str | None:
        """The answer about a sample; None if there is none."""
        return self._answers.get(sample["policy"], {}).get(sample["id"])

    def keep(self, sample: dict[str, Any], answer: str) -> None:
        """Save an answer at once, atomically; raises LoopguardError if that fails."""
        self._answers.setdefault(sample["policy"], {})[sample["id"]] = answer
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            fresh.write_text(json.dumps(self._answers, indent=2) + "\n", encoding="utf-8")
            fresh.replace(self._path)
        except OSError as error:
            raise LoopguardError(f"cannot write {self._path}: {error.strerror}; choose another file with --tally") from None

    def count(self, policy: str) -> dict[str, int]:
        """The number of times that each answer was given about a policy."""
        given = list(self._answers.get(policy, {}).values())
        return {answer: given.count(answer) for answer in ANSWERS}


def _read_answers(path: Path) -> dict[str, dict[str, str]]:
    try:
        answers = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise LoopguardError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        answers = None
    if not isinstance(answers, dict) or not all(_is_answers(given) for given in answers.values()):
        raise LoopguardError(f"{path} is not a tally; choose another file with --tally")
    return answers


def _is_answers(given: Any) -> bool:  # noqa: ANN401  # decoded JSON
    return isinstance(given, dict) and all(answer in ANSWERS for answer in given.values())
