"""Narrowing: tools are taken out of those that a request declares, so that the model cannot call them.

No other byte changes but the choice among the tools. Some APIs refuse a history with calls where no tool is declared: then the
one that was called last stays, and the choice is that none is called. What servers of tools (MCP) offer is not declared one by
one, and is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from enum import Enum
from typing import Final, NamedTuple

from extproc.ext_proc.changes.edits import NotEdited, open_patch
from extproc.request.document import NotCounted
from extproc.request.http import HttpRequest
from extproc.request.patch import AMBIGUOUS, Fields, Patch, Value
from extproc.sessions.history import find_called

Changes = dict[str, bytes | None]
"""New values of an object's members; None where one goes."""

_CONVERSATIONS: Final = ("messages", "input", "contents")
"""What a conversation is called; of a body that has two of them nobody can tell which one is read."""

_ELSEWHERE: Final = frozenset({"tools", "functions"})
"""Where other APIs declare tools than those that have them in an object of their own."""

_WRAPPERS: Final = ("function", "custom", "toolSpec", "systemTool", "tool")
"""An object of these names says what a tool is called."""

_WITHOUT_CHOICE: Final = "/api/chat"
"""Ollama's, which has no choice among tools, and needs none declared."""

_DECLARATIONS: Final = frozenset({"functionDeclarations", "function_declarations"})
_NAMED: Final = frozenset({"name", "type", *_WRAPPERS})
"""Of an entry that holds tools as Gemini has them, and that is a tool as others have them."""

_SERVERS: Final = frozenset({"mcp", "mcp_toolset", "mcpServers", "mcp_servers"})
_NO_TOOLS: Final = frozenset({"cachePoint"})
_LONGEST_KEY: Final = 256
_MODES: Final = frozenset({"auto", "any", "none", "required"})

_EDITION = re.compile(r"(?:_preview)?(?:_\d{4}_?\d\d_?\d\d)?\Z")
_SECOND_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")
_CALLED: Final = {"computer_use": "computer"}


def narrow(request: HttpRequest, body: bytes | memoryview, without: Collection[str] | None) -> bytes:
    """The request's body, in which some tools are not declared any more.

    Args:
        request: whose body it is.
        body: all of it.
        without: the tools, as they are declared or as their calls go by; None for all of them.

    Raises:
        NotEdited: it cannot be had.
    """
    mark, patch = open_patch(request, body)
    try:
        _Narrowing(patch, without, needs_tool=not request.path.endswith(_WITHOUT_CHOICE)).narrow()
        return mark + patch.apply()
    except NotCounted as why:
        raise NotEdited(why.reason) from None


def _open_object(patch: Patch, value: Value) -> Fields:
    """The members of what has to be an object.

    Raises:
        NotEdited: it is none.
        NotCounted: a key stands there twice, or it is too much.
    """
    if not patch.is_object(value):
        raise NotEdited(AMBIGUOUS)
    return patch.open_fields(value)


def _open_list(patch: Patch, value: Value) -> list[Value]:
    """The elements of what has to be a list.

    Raises:
        NotEdited: it is none.
        NotCounted: it is too much.
    """
    if not patch.is_list(value):
        raise NotEdited(AMBIGUOUS)
    return patch.open_items(value)


class _Api(NamedTuple):
    """How an API declares tools, in members of one object.

    Attributes:
        tools: the list.
        choice: among them.
        none: the choice of none; empty where the API has no such choice.
        auto: the choice that is the model's.
        along: what may not stand there without tools either.
    """

    tools: str
    choice: str
    none: bytes = b'"none"'
    auto: bytes = b'"auto"'
    along: tuple[str, ...] = ()


_CHAT: Final = _Api("tools", "tool_choice", along=("parallel_tool_calls",))
_FUNCTIONS: Final = _Api("functions", "function_call")
_RESPONSES: Final = _Api("tools", "tool_choice")
_ANTHROPIC: Final = _Api("tools", "tool_choice", b'{"type":"none"}', b'{"type":"auto"}')
_BEDROCK: Final = _Api("tools", "toolChoice", b"", b'{"auto":{}}')


class _Group:
    """A list of tools, or an object whose members are tools; where none is left, the group itself goes from its own group.

    Attributes:
        value: where it stands.
        members: the tools, and what else stands there.
        gone: the places of those that go.
    """

    __slots__ = ("_place", "_within", "gone", "members", "value")

    def __init__(self, value: Value, members: Sequence[Value], within: _Group | None = None, place: int = 0) -> None:
        """Start with all of them.

        Args:
            value: where it stands.
            members: the tools, and what else stands there.
            within: the group in which this one stands.
            place: there.
        """
        self.value = value
        self.members = members
        self.gone: set[int] = set()
        self._within = within
        self._place = place

    def remove(self, place: int) -> None:
        """Take one out."""
        self.gone.add(place)
        if self._within is not None and len(self.gone) == len(self.members):
            self._within.remove(self._place)

    @property
    def stays(self) -> bool:
        """It has not gone as a whole."""
        return self._within is None or len(self.gone) < len(self.members)


class _Tool(NamedTuple):
    """A tool that is declared.

    Attributes:
        names: as which it is declared, and by which its calls go.
        group: in which it stands.
        place: there.
        built_in: the API runs it, whatever the choice is.
    """

    names: tuple[str, ...]
    group: _Group
    place: int
    built_in: bool = False


class _Tools:
    """The tools in one list.

    Attributes:
        found: all of them, as declared.
        served: there are servers that offer others.
        plain: names stand in the tools themselves, as Anthropic has them.
    """

    __slots__ = ("_groups", "_patch", "found", "plain", "served")

    def __init__(self, patch: Patch, value: Value) -> None:
        """Read the list.

        Raises:
            NotEdited: it cannot be read in one way alone.
            NotCounted: the same, or it is too much.
        """
        self._patch = patch
        self._groups: list[_Group] = []
        self.found: list[_Tool] = []
        self.served = False
        self.plain = False
        group = self._open(value, _open_list(patch, value))
        for place, entry in enumerate(group.members):
            self._read(entry, group, place)

    def remove(self, tools: Sequence[_Tool]) -> None:
        """Take some out; call it once."""
        for tool in tools:
            tool.group.remove(tool.place)
        for group in self._groups:
            if group.stays:
                self._patch.remove(group.value, group.gone)

    def _open(self, value: Value, members: Sequence[Value], within: _Group | None = None, place: int = 0) -> _Group:
        group = _Group(value, members, within, place)
        self._groups.append(group)
        return group

    def _read(self, entry: Value, group: _Group, place: int) -> None:
        """An element of the list: a tool, several, a server, or something else."""
        fields = _open_object(self._patch, entry)
        kind = self._patch.read_text(fields.get("type"))
        if not _DECLARATIONS.isdisjoint(fields) and not _NAMED.isdisjoint(fields):
            raise NotEdited(AMBIGUOUS)
        self.plain = self.plain or kind == "mcp_toolset" or ("name" in fields and "function" not in fields)
        if kind in _SERVERS:
            self.served = True
        elif kind == "namespace" and "tools" in fields:
            self._read_list(fields["tools"], group, place)
        elif names := _read_names(self._patch, fields):
            self.found.append(_Tool(names, group, place))
        else:
            self._read_members(entry, fields, group, place)

    def _read_list(self, value: Value, group: _Group, place: int) -> None:
        """Tools in a list of their own."""
        inner = self._open(value, _open_list(self._patch, value), group, place)
        for number, entry in enumerate(inner.members):
            names = _read_names(self._patch, _open_object(self._patch, entry))
            self.found.append(_Tool(names, inner, number))

    def _read_members(self, entry: Value, fields: Fields, group: _Group, place: int) -> None:
        """Members that are tools each, or lists of them, as Gemini has them."""
        inner = self._open(entry, list(fields.values()), group, place)
        for number, (key, member) in enumerate(fields.items()):
            if key in _DECLARATIONS and self._patch.is_list(member):
                self._read_list(member, inner, number)
            elif key in _SERVERS:
                self.served = True
            elif key not in _NO_TOOLS:
                called = _SECOND_WORD.sub("_", key[:_LONGEST_KEY]).lower()
                self.found.append(_Tool((key, called), inner, number, built_in=True))


def _read_names(patch: Patch, fields: Fields) -> tuple[str, ...]:
    """As what a tool is declared or chosen, and by which its calls go; none where it is not named."""
    wrappers = [fields[key] for key in _WRAPPERS if key in fields and patch.is_object(fields[key])]
    named = [patch.open_fields(wrapper) for wrapper in wrappers] + [fields]
    if names := tuple([patch.read_text(inner["name"]) for inner in named if "name" in inner]):
        return names
    kind = patch.read_text(fields.get("type"))
    if not kind or kind in _MODES:
        return ()
    called = _EDITION.sub("", kind)
    return kind, _CALLED.get(called, called)


class _Outcome(Enum):
    """What has become of the tools in a list."""

    SAME = "all stay"
    FEWER = "some stay"
    FORBIDDEN = "some stay that may not be called"
    GONE = "none stays"


class _Narrowing:
    """One body's narrowing."""

    __slots__ = ("_gone", "_needs_tool", "_patch", "_without")

    def __init__(self, patch: Patch, without: Collection[str] | None, *, needs_tool: bool) -> None:
        """Take what to do.

        Args:
            patch: of the body.
            without: the names of tools; None for all of them.
            needs_tool: the API refuses a history with calls where no tool is declared.
        """
        self._patch = patch
        self._without = None if without is None else frozenset(without)
        self._needs_tool = needs_tool
        self._gone: set[str] = set()

    def narrow(self) -> None:
        """Edit a body of any API.

        Raises:
            NotEdited: it cannot be done.
            NotCounted: the same.
        """
        body = self._patch.root
        fields = self._open(body)
        conversations = [key for key in _CONVERSATIONS if key in fields]
        wrapped = not conversations and "request" in fields and self._patch.is_object(fields["request"])
        configured = "messages" in fields and "toolConfig" in fields
        if len(conversations) > 1 or ((wrapped or configured) and not _ELSEWHERE.isdisjoint(fields)):
            raise NotEdited(AMBIGUOUS)
        if "contents" in fields:
            self._narrow_gemini(body, fields)
        elif wrapped:
            inner = fields["request"]
            self._narrow_gemini(inner, self._open(inner))
        elif configured:
            self._narrow_bedrock(body, fields)
        elif "messages" in fields:
            changes = self._narrow_members(fields, _CHAT) | self._narrow_members(fields, _FUNCTIONS)
            self._patch.change(body, changes)
        else:
            self._patch.change(body, self._narrow_members(fields, _RESPONSES))

    def _open(self, value: Value) -> Fields:
        return _open_object(self._patch, value)

    def _narrow_members(self, fields: Fields, api: _Api) -> Changes:
        """Edit a list of tools, and say what becomes of the members beside it."""
        tools = self._open_tools(fields, api.tools)
        if tools is None:
            return {}
        if api is _CHAT and tools.plain:
            api = _ANTHROPIC
        outcome = self._take_out(tools)
        if outcome is _Outcome.GONE:
            return dict.fromkeys((api.tools, api.choice, *api.along))
        if outcome is _Outcome.FORBIDDEN:
            return {api.choice: _forbid(api)}
        choice = fields.get(api.choice)
        if outcome is _Outcome.FEWER and choice is not None and self._patch.is_object(choice):
            return self._mend_choice(choice, api)
        return {}

    def _narrow_bedrock(self, body: Value, fields: Fields) -> None:
        config = fields["toolConfig"]
        changes = self._narrow_members(self._open(config), _BEDROCK)
        if _BEDROCK.tools in changes:
            self._patch.change(body, {"toolConfig": None})
        else:
            self._patch.change(config, changes)

    def _narrow_gemini(self, owner: Value, fields: Fields) -> None:
        tools = self._open_tools(fields, "tools")
        if tools is None:
            return
        outcome = self._take_out(tools)
        changes: Changes = {"tools": None} if outcome is _Outcome.GONE else {}
        self._patch.change(owner, changes | self._choose_gemini(fields, outcome))

    def _choose_gemini(self, fields: Fields, outcome: _Outcome) -> Changes:
        """Edit the choice among Gemini's tools, and say what becomes of the member in which it stands."""
        key = _pick(fields, "toolConfig", "tool_config")
        if key not in fields or not self._patch.is_object(fields[key]):
            forbidden = b'{"functionCallingConfig":{"mode":"NONE"}}'
            return {key: forbidden} if outcome is _Outcome.FORBIDDEN else {}
        config = fields[key]
        inner = self._open(config)
        calling = _pick(inner, "functionCallingConfig", "function_calling_config")
        if outcome is _Outcome.FEWER and calling in inner and self._patch.is_object(inner[calling]):
            outcome = self._mend_names(self._open(inner[calling]))
        if outcome is _Outcome.FORBIDDEN:
            self._patch.change(config, {calling: b'{"mode":"NONE"}'})
        elif outcome is _Outcome.GONE and calling in inner:
            self._patch.change(config, {calling: None})
        return {}

    def _mend_names(self, calling: Fields) -> _Outcome:
        """Edit the list of functions that Gemini may call; one of which none is left forbids all."""
        key = _pick(calling, "allowedFunctionNames", "allowed_function_names")
        if key not in calling or not self._patch.is_list(calling[key]):
            return _Outcome.FEWER
        names = self._patch.open_items(calling[key])
        gone = {place for place, name in enumerate(names) if self._patch.read_text(name) in self._gone}
        if gone and len(gone) == len(names):
            return _Outcome.FORBIDDEN
        self._patch.remove(calling[key], gone)
        return _Outcome.FEWER

    def _open_tools(self, fields: Fields, key: str) -> _Tools | None:
        """The tools in a member; None where it is not there, or null."""
        if key not in fields or self._patch.is_null(fields[key]):
            return None
        return _Tools(self._patch, fields[key])

    def _take_out(self, tools: _Tools) -> _Outcome:
        """Edit a list of tools, unless all of it goes."""
        gone = [tool for tool in tools.found if self._without is None or not self._without.isdisjoint(tool.names)]
        forbidden = self._without is None and tools.served
        if not gone and not forbidden:
            return _Outcome.SAME
        if len(gone) == len(tools.found) and not tools.served:
            needed = self._find_needed([tool for tool in gone if not tool.built_in])
            if needed is None:
                return _Outcome.GONE
            gone.remove(needed)
            forbidden = True
        self._gone.update([name for tool in gone for name in tool.names])
        tools.remove(gone)
        return _Outcome.FORBIDDEN if forbidden else _Outcome.FEWER

    def _find_needed(self, tools: Sequence[_Tool]) -> _Tool | None:
        """The one that has to stay: that which was called last, else the first; None where the API does without."""
        if not tools or not self._needs_tool:
            return None
        called = find_called(self._patch, {name for tool in tools for name in tool.names})
        return next((tool for tool in tools if called in tool.names), tools[0]) if called is not None else None

    def _mend_choice(self, value: Value, api: _Api) -> Changes:
        """Edit a choice among tools, or say what stands in its place: it may be one that has gone, or a list of such."""
        choice = self._open(value)
        if self._patch.read_text(choice.get("type")) == "allowed_tools":
            return self._mend_allowed(choice, api)
        if self._gone.isdisjoint(_read_names(self._patch, choice)):
            return {}
        if "disable_parallel_tool_use" not in choice:
            return {api.choice: api.auto}
        self._patch.change(value, {"type": b'"auto"', "name": None})
        return {}

    def _mend_allowed(self, choice: Fields, api: _Api) -> Changes:
        """The same of a list of tools that may be called."""
        if "allowed_tools" in choice:
            choice = self._open(choice["allowed_tools"])
        allowed = self._open_tools(choice, "tools")
        if allowed is None:
            return {}
        gone = [tool for tool in allowed.found if not self._gone.isdisjoint(tool.names)]
        if gone and len(gone) == len(allowed.found) and not allowed.served:
            return {api.choice: _forbid(api)}
        allowed.remove(gone)
        return {}


def _forbid(api: _Api) -> bytes:
    """The choice of none.

    Raises:
        NotEdited: the API has no such choice.
    """
    if not api.none:
        raise NotEdited("no_choice")
    return api.none


def _pick(fields: Fields, *keys: str) -> str:
    """Which spelling of a key is there, the first where none is.

    Raises:
        NotEdited: there are several.
    """
    found = [key for key in keys if key in fields]
    if len(found) > 1:
        raise NotEdited(AMBIGUOUS)
    return found[0] if found else keys[0]
