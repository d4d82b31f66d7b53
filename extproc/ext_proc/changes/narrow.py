"""Narrowing: keeps the model from calling some declared tools, or several tools in parallel.

Only the declarations, the tool choice and the switch for parallel calls change. If all tools are
forbidden, the tool choice says so and the declarations stay, because providers' prompt caches begin
with them. If the API has no such choice, session limits remove the declarations, and landing fails.
Tools of an MCP server are not declared individually, so they stay.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from extproc.apis import TOOL_LISTS, TOOL_WORDS, read_path
from extproc.apis.api import Changes, ToolList, ToolsLeft
from extproc.bounded import Memo
from extproc.ext_proc.changes.edits import NotEdited, edit
from extproc.request.document import INSPECTION, Document
from extproc.request.http import HttpRequest
from extproc.request.patch import AMBIGUOUS, Fields, Patch, Value

_WRAPPERS: Final = TOOL_WORDS.wrappers
_LISTS: Final = TOOL_WORDS.lists
_SERVERS: Final = TOOL_WORDS.servers

_NAMED: Final = frozenset({"name", "type"}) | _WRAPPERS
"""Keys of an entry that is a tool, not a container of tool lists."""

_AT_TOP: Final = frozenset(
    [
        tools.tools
        for lists in TOOL_LISTS.values()
        for tools in lists
        if not (tools.wraps or tools.holder)
    ]
)
"""Top-level keys of tool declarations, beside the conversation."""

NO_CHOICE: Final = "no_choice"
"""The reason for a body whose API cannot forbid the calls."""

_LONGEST_KEY: Final = 256

_KNOWN_BYTES: Final = 800
_NAMES_BYTES: Final = 400
"""Memory of Python's objects for a cached list, and for each of its tools."""

_EDITION = re.compile(r"(?:_preview)?(?:_\d{4}_?\d\d_?\d\d)?\Z")
_SECOND_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")


class Tools(NamedTuple):
    """The tools that an answer must not call, named as in declarations or in calls.

    Attributes:
        without: the tools to remove; None for all except `kept`.
        kept: the tools to keep.
        scarce: if one of these is offered, parallel calls are turned off, where the API can.
        removes: declarations may be removed. Otherwise only the tool choice forbids tools, and
            tools that the API runs itself stay.
    """

    without: Collection[str] | None
    kept: Collection[str] = ()
    scarce: Collection[str] = ()
    removes: bool = True


def narrow(
    request: HttpRequest, body: bytes | memoryview, tools: Tools, document: Document | None = None
) -> bytes:
    """Remove tools from a request's body; see `edit` and `take_out`.

    Raises:
        NotEdited: the tools cannot be removed.
    """
    return b"".join(
        edit(request, body, lambda patch: take_out(patch, request.path, tools), document)
    )


def take_out(patch: Patch, path: str, tools: Tools) -> bool:
    """Remove or forbid tools in an open body of any API; returns whether it changes.

    Args:
        patch: the edit of the body.
        path: the request's path.
        tools: the tools.

    Raises:
        NotEdited: the body is ambiguous, or its API cannot forbid calls.
        NotCounted: the body is ambiguous or too large.
    """
    before = patch.count_changes()
    _Narrowing(patch, tools, path).narrow()
    return patch.count_changes() > before


def _open_object(patch: Patch, value: Value) -> Fields:
    """The members of an object.

    Raises:
        NotEdited: the value is not an object.
        NotCounted: a key is repeated, or the object is too large.
    """
    if not patch.is_object(value):
        raise NotEdited(AMBIGUOUS)
    return patch.open_fields(value)


def _open_list(patch: Patch, value: Value) -> list[Value]:
    """The elements of a list.

    Raises:
        NotEdited: the value is not a list.
        NotCounted: the list is too large.
    """
    if not patch.is_list(value):
        raise NotEdited(AMBIGUOUS)
    return patch.open_items(value)


class _Group:
    """A list of tools, or an object whose members are tools.

    If it becomes empty, it is removed from its parent.

    Attributes:
        value: the list or object.
        members: its tools and other entries.
        gone: positions of the members to remove.
        within: the parent group; None for the outermost.
    """

    def __init__(
        self, value: Value, members: Sequence[Value], within: _Group | None = None, place: int = 0
    ) -> None:
        """Create a group.

        Args:
            value: the list or object.
            members: its tools and other entries.
            within: the parent group; None for the outermost.
            place: the position in the parent group.
        """
        self.value = value
        self.members = members
        self.gone: set[int] = set()
        self.within = within
        self._place = place

    def remove(self, place: int) -> None:
        self.gone.add(place)
        if self.within is not None and len(self.gone) == len(self.members):
            self.within.remove(self._place)


class _Tool(NamedTuple):
    """A declared tool.

    Attributes:
        names: the names under which it is declared and called.
        group: the group that contains it.
        place: its position in the group.
        built_in: the API runs it regardless of the tool choice.
    """

    names: tuple[str, ...]
    group: _Group
    place: int
    built_in: bool = False


class _KnownTools(NamedTuple):
    """The cached content of a tool list without groups.

    Attributes:
        names: names of the tools, by position in the list.
        served: see `_Tools`.
        dialect: see `_Tools`.
        units: the units that reading it took.
    """

    names: dict[int, tuple[str, ...]]
    served: bool
    dialect: ToolList | None
    units: int


def measure_list(text: bytes, tools: int) -> int:
    """The memory of a cached list of tools, in bytes; a lower bound."""
    return len(text) + _KNOWN_BYTES + _NAMES_BYTES * tools


_KNOWN: Final[Memo[tuple[bytes, str], _KnownTools]] = Memo(
    4 * 2**20, lambda key, known: measure_list(key[0], len(known.names))
)
"""Tool lists by their bytes and the list's name; an agent sends the same one with each request.
Without the cache, the benchmark's row "a request that loses a tool" takes more than 10 % longer."""


class _Tools:
    """The tools in one list.

    Attributes:
        found: the declared tools.
        served: the list also names servers, which offer more tools.
        dialect: the other API in whose format the list is written, if any.
    """

    def __init__(self, patch: Patch, value: Value, dialects: Sequence[ToolList], name: str) -> None:
        """Read the list.

        Args:
            patch: the edit of the body.
            value: the list.
            dialects: other APIs in whose format it may be written.
            name: identifies these APIs' lists in the cache; empty without any.

        Raises:
            NotEdited: the list is ambiguous.
            NotCounted: a key is repeated, or the list is too large.
        """
        self._patch = patch
        self._groups: list[_Group] = []
        self.found: list[_Tool] = []
        self.served = False
        self.dialect: ToolList | None = None
        self._dialects = dialects
        group = self._open(value, _open_list(patch, value))
        key = bytes(patch.read_raw(value)), name
        known = _KNOWN.get(key)
        if known is not None:
            patch.take(known.units)  # charged as if it were read
            self.found = [_Tool(names, group, place) for place, names in known.names.items()]
            self.served = known.served
            self.dialect = known.dialect
            return
        left = INSPECTION.left
        for place, entry in enumerate(group.members):
            self._read(entry, group, place)
        if len(self._groups) == 1:
            _KNOWN.put(key, self._describe(left - INSPECTION.left))

    def _describe(self, units: int) -> _KnownTools:
        return _KnownTools(
            {tool.place: tool.names for tool in self.found}, self.served, self.dialect, units
        )

    def remove(self, tools: Sequence[_Tool]) -> None:
        """Remove these tools. Call this only once."""
        for tool in tools:
            tool.group.remove(tool.place)
        for group in self._groups:
            # The caller removes an empty outermost group
            if group.within is None or len(group.gone) < len(group.members):
                self._patch.remove(group.value, group.gone)

    def _open(
        self, value: Value, members: Sequence[Value], within: _Group | None = None, place: int = 0
    ) -> _Group:
        group = _Group(value, members, within, place)
        self._groups.append(group)
        return group

    def _read(self, entry: Value, group: _Group, place: int) -> None:
        """Read an element of the list: a tool, a group of tools, a server, or something else."""
        fields = _open_object(self._patch, entry)
        kind = self._patch.read_text(fields.get("type"))
        if not _LISTS.isdisjoint(fields) and not _NAMED.isdisjoint(fields):
            raise NotEdited(AMBIGUOUS)
        for dialect in self._dialects:
            if self.dialect is None and dialect.owns is not None and dialect.owns(kind, fields):
                self.dialect = dialect
        within = TOOL_WORDS.groups.get(kind, "")
        if kind in _SERVERS:
            self.served = True
        elif within and within in fields:
            self._read_list(fields[within], group, place)
        elif names := _read_names(self._patch, fields):
            self.found.append(_Tool(names, group, place))
        else:
            self._read_members(entry, fields, group, place)

    def _read_list(self, value: Value, group: _Group, place: int) -> None:
        inner = self._open(value, _open_list(self._patch, value), group, place)
        for number, entry in enumerate(inner.members):
            names = _read_names(self._patch, _open_object(self._patch, entry))
            self.found.append(_Tool(names, inner, number))

    def _read_members(self, entry: Value, fields: Fields, group: _Group, place: int) -> None:
        """Read an object whose members are tools or lists of tools."""
        inner = self._open(entry, list(fields.values()), group, place)
        for number, (key, member) in enumerate(fields.items()):
            if key in _LISTS and self._patch.is_list(member):
                self._read_list(member, inner, number)
            elif key in _SERVERS:
                self.served = True
            elif key not in TOOL_WORDS.others:
                called = _SECOND_WORD.sub("_", key[:_LONGEST_KEY]).lower()
                self.found.append(_Tool((key, called), inner, number, built_in=True))


def _read_names(patch: Patch, fields: Fields) -> tuple[str, ...]:
    """The names under which a tool is declared, chosen and called; empty if it has none."""
    wrappers = [
        value for key, value in fields.items() if key in _WRAPPERS and patch.is_object(value)
    ]
    named = [patch.open_fields(wrapper) for wrapper in wrappers] + [fields]
    if names := tuple([patch.read_text(inner["name"]) for inner in named if "name" in inner]):
        return names
    kind = patch.read_text(fields.get("type"))
    if not kind or kind in TOOL_WORDS.modes:
        return ()
    called = _EDITION.sub("", kind)
    return kind, TOOL_WORDS.called.get(called, called)


class _Narrowing:
    """Narrows one body."""

    def __init__(self, patch: Patch, tools: Tools, path: str) -> None:
        self._patch = patch
        self._without = None if tools.without is None else frozenset(tools.without)
        self._kept = frozenset(tools.kept)
        self._scarce = frozenset(tools.scarce)
        self._removes = tools.removes
        self._path = path
        self._gone: set[str] = set()

    def narrow(self) -> None:
        """Edit the body; raises as `take_out` does."""
        owner = self._patch.root
        fields = self._open(owner)
        beside = _find_conversation(self._patch, fields)
        lists = TOOL_LISTS.get(beside, [])
        wrapped = any(tools.wraps for tools in lists)
        if (
            wrapped or any(tools.holder and tools.holder in fields for tools in lists)
        ) and not _AT_TOP.isdisjoint(fields):
            raise NotEdited(AMBIGUOUS)
        if wrapped:
            owner = fields[beside]
            fields = self._open(owner)
        changes: Changes = {}
        for tools in lists:
            if tools.owns is None:
                changes |= (
                    self._narrow_holder(fields, tools)
                    if tools.holder
                    else self._narrow_members(fields, tools)
                )
        self._patch.change(owner, changes)

    def _open(self, value: Value) -> Fields:
        return _open_object(self._patch, value)

    def _narrow_holder(self, fields: Fields, api: ToolList) -> Changes:
        """Edit the object that contains a tool list, or remove it if no tool is left."""
        if api.holder not in fields:
            return {}
        holder = fields[api.holder]
        changes = self._narrow_members(self._open(holder), api)
        if api.tools in changes:
            return {api.holder: None}
        self._patch.change(holder, changes)
        return {}

    def _narrow_members(self, fields: Fields, api: ToolList) -> Changes:
        """Edit a tool list, and return the changes to the members beside it."""
        place = api.holder, api.tools
        others = [
            tools
            for tools in TOOL_LISTS[api.beside]
            if tools.owns is not None and (tools.holder, tools.tools) == place
        ]
        name = f"{api.beside} {api.holder} {api.tools}" if others else ""
        tools = self._open_tools(fields, api.tools, others, name)
        if tools is None:
            return {}
        if tools.dialect is not None:
            api = tools.dialect
        scarce = api.hold is not None and any(
            not self._scarce.isdisjoint(tool.names) for tool in tools.found
        )
        outcome = self._take_out(tools, api)
        if outcome is ToolsLeft.GONE:
            return {api.tools: None}
        if api.choose is not None:
            return api.choose(self._patch, fields, outcome, self._gone)
        if outcome is ToolsLeft.FORBIDDEN:
            return {api.choice: _forbid(api)}
        choice, changes = fields.get(api.choice), Changes()
        if outcome is ToolsLeft.FEWER and choice is not None and self._patch.is_object(choice):
            changes = self._mend_choice(choice, api)
        if scarce and api.hold is not None:
            changes = api.hold(self._patch, fields, changes, self._path)
        return changes

    def _open_tools(
        self, fields: Fields, key: str, others: Sequence[ToolList] = (), name: str = ""
    ) -> _Tools | None:
        """The tools in a member; None if it is missing or null."""
        if key not in fields or self._patch.is_null(fields[key]):
            return None
        return _Tools(self._patch, fields[key], others, name)

    def _take_out(self, tools: _Tools, api: ToolList) -> ToolsLeft:
        """Remove tools from a list.

        If none is left, the caller edits the tool choice or removes the list.
        """
        if self._without is None:
            gone = [tool for tool in tools.found if self._kept.isdisjoint(tool.names)]
        else:
            gone = [tool for tool in tools.found if not self._without.isdisjoint(tool.names)]
        served = self._without is None and tools.served
        if served and len(gone) < len(tools.found):
            raise NotEdited(NO_CHOICE)  # a server's tools cannot be kept selectively
        if not gone and not served:
            return ToolsLeft.SAME
        if served or (len(gone) == len(tools.found) and not tools.served):
            return self._forbid_all(tools, api)
        self._gone.update([name for tool in gone for name in tool.names])
        tools.remove(gone)
        return ToolsLeft.FEWER

    def _forbid_all(self, tools: _Tools, api: ToolList) -> ToolsLeft:
        """Decide how to forbid all tools of a list.

        Tools that the API runs regardless of the choice must be removed.
        """
        built_in = [tool for tool in tools.found if tool.built_in]
        if len(built_in) == len(tools.found) and not tools.served:
            return ToolsLeft.GONE if self._removes else ToolsLeft.SAME
        if api.none and read_path(self._path).takes_choice:
            if self._removes:
                tools.remove(built_in)
            return ToolsLeft.FORBIDDEN
        if not self._removes or (api.call and api.call in self._patch.data):
            raise NotEdited(NO_CHOICE)
        return ToolsLeft.GONE

    def _mend_choice(self, value: Value, api: ToolList) -> Changes:
        """Adapt a tool choice that names removed tools."""
        choice = self._open(value)
        kind = self._patch.read_text(choice.get("type"))
        if kind in TOOL_WORDS.allowed:
            return self._mend_allowed(self._open(choice[kind]) if kind in choice else choice, api)
        if self._gone.isdisjoint(_read_names(self._patch, choice)):
            return {}
        if TOOL_WORDS.kept.isdisjoint(choice):
            return {api.choice: api.auto}
        self._patch.change(value, {"type": b'"auto"', "name": None})
        return {}

    def _mend_allowed(self, choice: Fields, api: ToolList) -> Changes:
        """Adapt a tool choice that lists the allowed tools."""
        allowed = self._open_tools(choice, "tools")
        if allowed is None:
            return {}
        gone = [tool for tool in allowed.found if not self._gone.isdisjoint(tool.names)]
        if gone and len(gone) == len(allowed.found) and not allowed.served:
            return {api.choice: _forbid(api)}
        allowed.remove(gone)
        return {}


def _forbid(api: ToolList) -> bytes:
    """The tool choice that forbids calls.

    Raises:
        NotEdited: the API has no such choice.
    """
    if not api.none:
        raise NotEdited(NO_CHOICE)
    return api.none


def _find_conversation(patch: Patch, fields: Fields) -> str:
    """The key of the conversation beside which the body declares tools; empty if there is none.

    Raises:
        NotEdited: there are several, and it is unclear which one the upstream reads.
    """
    wrapping = [key for key, lists in TOOL_LISTS.items() if lists[0].wraps]
    found = [key for key in TOOL_LISTS if key and key in fields and key not in wrapping]
    if len(found) > 1:
        raise NotEdited(AMBIGUOUS)
    found += [key for key in wrapping if patch.is_object(fields.get(key))]
    return found[0] if found else ""
