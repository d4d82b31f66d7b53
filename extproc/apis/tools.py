"""Reads the tools that a request declares, in any API; `narrow` edits them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any, Final

from msgspec import Raw, ValidationError, defstruct, json

from extproc.apis.api import ToolWords
from extproc.apis.conversation import TOOL_KEYS, Conversation
from extproc.request.document import ABSENT, Document, decode_json

OTHERS: Final = ""
"""Stands for tools whose names are unknown: built-in ones, those of servers, and those beyond the
limit."""

_LONGEST_LIST: Final = 262_144
_MOST_OBJECTS: Final = 5_000
"""Longest list to read, in bytes, and its objects; reading it takes about a millisecond."""

_MOST_TOOLS: Final = 500
_READ_ONLY: Final = b"readOnlyHint"
"""MCP's hint that a tool changes nothing, which some clients pass on."""

_decode_hint: Final = json.Decoder(
    defstruct("Annotations", [("readOnlyHint", bool | None, None)], gc=False)
).decode


_NOT_PLAIN: Final = re.compile(rb"[^ !#-\[\]-~]")
"""Characters that JSON may write in several ways."""


class DeclaredTool:
    """A tool, read lazily, because a request may declare hundreds."""

    def __init__(
        self,
        tool: Any,  # noqa: ANN401  # made at run time
        entry: Any,  # noqa: ANN401  # made at run time
        get_schemas: Callable[[Any], tuple[Raw, ...]],
    ) -> None:
        """`entry` is the list's entry with the tool; `get_schemas` reads its schemas."""
        self._tool = tool
        self._entry = entry
        self._get_schemas = get_schemas

    @property
    def schema(self) -> Raw:
        """The raw JSON schema of its arguments; ABSENT if there is none."""
        return next(filter(None, self._get_schemas(self._tool)), ABSENT)

    @property
    def reads(self) -> bool | None:
        """Whether it only reads, if the request says so."""
        hint = _read_hint(self._tool)
        return _read_hint(self._entry) if hint is None else hint


class ToolReader:
    """Reads lists in the words of all APIs, because gateways mix them."""

    def __init__(self, words: ToolWords) -> None:
        schemas = sorted(words.schemas)
        holders = sorted({*words.wrappers, *words.lists, *words.groups.values()})
        self._get_schemas = attrgetter(*schemas)
        self._get_held = attrgetter(*holders)
        keys = [(key, Raw, ABSENT) for key in (*schemas, "annotations")]
        inner: Any = defstruct("Inner", [("name", str, ""), *keys], gc=False)
        held: Any = inner | list[inner] | None
        entry: Any = defstruct(
            "Entry", [("name", str, ""), *keys, *[(key, held, None) for key in holders]], gc=False
        )
        self._unknown = DeclaredTool(entry(), entry(), self._get_schemas)
        self._called = words.called
        self._decode_list = json.Decoder(list[entry]).decode
        self._decode_holder = json.Decoder(defstruct("Holder", [("tools", list[entry])])).decode

    def read(self, conversation: Conversation) -> dict[str, DeclaredTool]:
        """The declared tools by name; empty if they are unreadable."""
        tools: dict[str, DeclaredTool] = {}
        for key in TOOL_KEYS:
            raw = bytes(conversation.find_field(key) or b"")
            if raw and len(raw) <= _LONGEST_LIST and raw.count(b"{") <= _MOST_OBJECTS:
                self._read_list(raw, tools)
        return tools

    def find_hints(self, conversation: Conversation) -> dict[str, bool]:
        """Whether each tool only reads, by name, if the request says so."""
        beside = conversation.known.beside if conversation.known is not None else None
        if beside is not None and not beside.hints:
            return {}
        for key in TOOL_KEYS:
            if bytes(conversation.find_field(key) or b"").find(_READ_ONLY) >= 0:
                return {
                    name: tool.reads
                    for name, tool in self.read(conversation).items()
                    if tool.reads is not None
                }
        if beside is not None:
            beside.hints = False
        return {}

    def may_declare(self, document: Document, tools: frozenset[str]) -> bool:
        """Whether a body may declare one of these tools; a quick check, true if in doubt."""
        conversation = document.conversation
        if not isinstance(conversation, Conversation) or not conversation.shows_lists:
            return self._may_hold(bytes(document), tools)
        beside = conversation.known.beside if conversation.known is not None else None
        if beside is not None and beside.declares is not None and beside.declares[0] == tools:
            return beside.declares[1]
        found = False
        for key in TOOL_KEYS:
            raw = conversation.find_field(key)
            found = found or (
                raw is not None and len(raw) > 0 and self._may_hold(bytes(raw), tools)
            )
        if beside is not None:
            beside.declares = tools, found
        return found

    def _may_hold(self, raw: bytes, tools: Collection[str]) -> bool:
        if raw.find(b"\\") >= 0 and (raw.find(b"\\u") >= 0 or raw.find(b"\\/") >= 0):
            return True
        for tool in tools:
            for spelled in self._spell(tool):
                if raw.find(spelled) >= 0:
                    return True
        return False

    def _spell(self, tool: str) -> list[bytes]:
        """Bytes that a tool's declaration contains, unless it has unnecessary escapes."""
        names = [tool, *[kind for kind, called in self._called.items() if called == tool]]
        return [_NOT_PLAIN.split(name.encode("utf-8", "surrogateescape"))[0] for name in names]

    def _read_list(self, raw: bytes, tools: dict[str, DeclaredTool]) -> None:
        try:
            entries = (
                decode_json(raw, self._decode_holder).tools
                if raw[:1] == b"{"
                else decode_json(raw, self._decode_list)
            )
            for entry in entries[:_MOST_TOOLS]:
                held = list(filter(None, self._get_held(entry)))
                if entry.name and not any(isinstance(value, list) for value in held):
                    held = []
                for value in held or [entry]:
                    for tool in value if isinstance(value, list) else [value]:
                        tools[tool.name or OTHERS] = DeclaredTool(tool, entry, self._get_schemas)
            if len(entries) > _MOST_TOOLS:
                tools[OTHERS] = self._unknown
        except ValidationError:
            return


def _read_hint(tool: Any) -> bool | None:  # noqa: ANN401  # made at run time
    if not tool.annotations:
        return None
    try:
        hint: bool | None = decode_json(tool.annotations, _decode_hint).readOnlyHint
    except ValidationError:
        return None
    return hint
