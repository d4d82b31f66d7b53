"""Asks for the usage of a streamed answer, which some APIs report only on request.

The client then gets an additional event, so this happens only if the policy says so.
"""

# interpreted: a single search in a body

from __future__ import annotations

from extproc.apis import read_path
from extproc.request.patch import Patch


def ask_usage(patch: Patch, path: str) -> bool:
    """Make the answer to an open body report usage; returns whether the body changes.

    Raises:
        NotCounted: the body is ambiguous or too large.
    """
    ask = read_path(path).ask_usage
    before = patch.count_changes()
    if ask is not None and patch.is_object(patch.root):
        patch.change(patch.root, ask(patch, patch.open_fields(patch.root)))
    return patch.count_changes() > before
