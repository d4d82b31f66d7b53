"""Results of agents' tools, each with its kind of failure.

They were written by hand before the rule for failures was read; the last 63, from `swift` on, when
it first stood. Of those, 81 % of what it called errors were errors, and it found 79 % of the
errors. The mistakes were then fixed.

In `tool_results.txt`, a line `%%% kind tool` precedes each result; `extproc.detectors.failures`
explains the kinds. Results that only quote failures of others (sources, logs, lists) are `none`.
"""

import re
from pathlib import Path

_PARTS = re.split(
    r"(?m)^%%% (\w+) \w+\n", Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
)[1:]

# The kind of failure, empty for none, and the result.
TOOL_RESULTS = [
    ("" if kind == "none" else kind, text.removesuffix("\n"))
    for kind, text in zip(_PARTS[::2], _PARTS[1::2], strict=True)
]
