"""What mkdocs does besides: the first page is README.md, and links to files beside docs/ lead to the sources."""  # noqa: INP001  # a hook

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))+)\]\(((?:\.\./)+)([^)#]*)(#[^)]*)?\)")
"""A link that leaves the folder."""

_BESIDE = re.compile(r"(\]\(|src=\"|srcset=\")(?!https?:|#|docs/)([^)\"]+)")
_DOCS = re.compile(r"(\]\(|src=\"|srcset=\")docs/")


def on_files(files: Any, config: Any) -> Any:  # noqa: ANN401  # mkdocs' own
    """Add the first page."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = _DOCS.sub(r"\1", _BESIDE.sub(r"\1../\2", text))
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Lead links to files beside docs/ to the sources; without an address of these, keep their words alone."""
    source = os.environ.get("SOURCE_URL", "")

    def lead(found: re.Match[str]) -> str:
        words, _, path, anchor = found.groups()
        if path == "README.md":
            return f"[{words}](index.md{anchor or ''})"
        return f"[{words}]({source}/blob/main/{path}{anchor or ''})" if source else words

    return _LINK.sub(lead, markdown)
