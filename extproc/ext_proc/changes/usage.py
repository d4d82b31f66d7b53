"""Asks for the usage of a streamed answer, which some APIs report only on request.

The client gets one more event, with the usage. So this happens only if the policy says so.
"""

# interpreted: one search in a body that is edited

from __future__ import annotations

from extproc.apis import read_path
from extproc.request.patch import Patch


def ask_usage(patch: Patch, path: str) -> bool:
    """Change a body that is being edited so that its answer reports usage; returns whether it changes.

    Raises:
        NotCounted: the body is ambiguous or too large.
    """
    ask = read_path(path).ask_usage
    before = patch.count_changes()
    if ask is not None and patch.is_object(patch.root):
        patch.change(patch.root, ask(patch, patch.open_fields(patch.root)))
    return patch.count_changes() > before
