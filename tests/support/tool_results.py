"""Results of the tools that agents use, each with its kind of failure.

They were written by hand before the rule for failures was read; the last 63, from `swift` on, when it first stood. Of what it
called errors among those, 81 % were errors, and it found 79 % of them. What both showed was then mended.

In `tool_results.txt`, a line `%%% kind tool` stands before each result: `none`, `fatal`, `transient` or `missing`, as
`extproc.detectors.failures` explains them. What only shows failures of others (sources, logs, lists) is `none`.
"""

from __future__ import annotations

import re
from pathlib import Path

_PARTS = re.split(r"(?m)^%%% (\w+) \w+\n", Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))[1:]

TOOL_RESULTS = [
    ("" if kind == "none" else kind, text.removesuffix("\n")) for kind, text in zip(_PARTS[::2], _PARTS[1::2], strict=True)
]
"""The kind of failure, empty where there is none, and the result."""
