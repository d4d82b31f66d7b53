"""Nearly valid bodies of every API, and a check of edits by Python's own JSON parser.

`python -m tests.support.edit_fuzzer 1000000` tries a million.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import Any, Final, TypeAlias

from extproc.apis import locate_results
from extproc.apis.places import Place, add_notes
from extproc.ext_proc.changes.edits import NotEdited, edit
from extproc.ext_proc.changes.narrow import Tools, narrow
from extproc.ext_proc.changes.steer import MAX_PLACES
from extproc.request.document import limit_integers
from extproc.request.http import HttpRequest
from extproc.request.patch import Patch

NOTE: Final = '\n\n[note: "f" \\ again]'
_WRITTEN: Final = json.dumps(NOTE)[1:-1]
# Reasons to leave a body unchanged. A failed verification is not among them: it means a wrong edit.
_REASONS: Final = {
    "not_json",
    "ambiguous_body",
    "inspect_limit",
    "no_messages",
    "no_result",
    "no_choice",
}

_ASSISTANTS: Final = {"assistant", "model", "ai"}
_REQUEST: Final = HttpRequest("POST", "/v1/x")

Value: TypeAlias = Any


class Members(list[tuple[str, Value]]):
    """An object that may have duplicate keys."""


class WrongEditError(AssertionError):
    pass


# --- bodies

_STRINGS: Final = (
    '"a"',
    '""',
    '"f"',
    '"seen"',
    '"\\u00e9"',
    '"\\ud83d\\ude00"',
    '"\\ud800"',
    '"x\\udc00"',
    '"\\\\ud800"',
    '"say \\"hi\\""',
    '"]},{"',
    '"\\\\"',
    '"{\\"role\\":\\"user\\"}"',
    '"\\u0000"',
    '"\u00e9"',
    '"\U0001f600"',
    '"\\/"',
    '"a,b:c"',
    '",\\"text\\":\\"b"',
    '"[{"',
    '"text"',
    '"user"',
)
_JUNK: Final = (
    *_STRINGS[:8],
    "null",
    "true",
    "0",
    "-1.5e9",
    "1E400",
    "12345678901234567890",
    "[]",
    "{}",
    "[[]]",
    "[null]",
    '{"":{}}',
    '{"type":"text"}',
    '[{"text":"a"}]',
    '{"content":"a"}',
    "[1,2]",
)
_SPACES: Final = ("",) * 12 + (" ", "\n", "  ", "\t \r\n")
_NAMES: Final = ("f", "g", "pay")


class Writer:
    """Writes random bodies as text. Each body draws its own chances of oddities."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self._odd = random.choice((0.0, 0.0, 0.02, 0.1))
        self._twice = random.choice((0.0, 0.0, 0.0, 0.05))
        self._tools = random.randrange(8)

    def chance(self, of: float) -> bool:
        return self.random.random() < of

    def pick(self, *values: str) -> str:
        return self.random.choice(values)

    def space(self) -> str:
        return self.random.choice(_SPACES)

    def junk(self) -> str:
        return self.random.choice(_JUNK)

    def text(self) -> str:
        return self.junk() if self.chance(self._odd) else self.random.choice(_STRINGS)

    def write_list(self, items: Sequence[str]) -> str:
        if self.chance(self._odd):
            return self.junk()
        kept = [self.junk() if self.chance(self._odd) else item for item in items]
        return (
            "["
            + ",".join([self.space() + item + self.space() for item in kept])
            + self.space()
            + "]"
        )

    def write(self, **members: str | None) -> str:
        """An object of the members that are not None, shuffled, sometimes with more.

        Keys lose a trailing `_`.
        """
        given = [(key.rstrip("_"), value) for key, value in members.items() if value is not None]
        if self.chance(self._odd):
            given.append(
                (
                    self.pick("x", "text", "content", "type", "name", "output", "gateway_note", ""),
                    self.junk(),
                )
            )
        if given and self.chance(self._twice):
            key, value = self.random.choice(given)
            given.append((key, value if self.chance(0.5) else self.junk()))
        if given and self.chance(self._odd):
            given.remove(self.random.choice(given))
        if self.chance(0.5):
            self.random.shuffle(given)
        return (
            "{" + ",".join([self._write_member(*member) for member in given]) + self.space() + "}"
        )

    def _write_member(self, key: str, value: str) -> str:
        written = "".join(
            [f"\\u{ord(letter):04x}" if self.chance(self._odd) else letter for letter in key]
        )
        return f'{self.space()}"{written}"{self.space()}:{self.space()}{value}{self.space()}'

    # --- what stands in contents

    def some(self, make: Callable[[], str], most: int = 3) -> list[str]:
        return [make() for _ in range(self.random.randint(0, most))]

    def block(self, depth: int = 0) -> str:
        kind = self.random.randrange(9)
        if kind < 3:
            return self.write(
                type=self.pick('"text"', '"input_text"', '"output_text"'), text=self.text()
            )
        if kind == 3:
            return self.write(text=self.text())
        if kind == 4 and depth < 4:
            return self.write(
                type='"tool_result"',
                tool_use_id='"1"',
                content=self.content(depth + 1),
                is_error=self._maybe("false"),
            )
        if kind == 5 and depth < 4:
            return self.write(
                toolResult=self.write(
                    toolUseId='"1"',
                    content=self.content(depth + 1),
                    status=self._maybe('"success"'),
                )
            )
        if kind == 6:
            return (
                self.write(functionResponse=self.response())
                if self.chance(0.8)
                else self.write(function_response=self.response())
            )
        return self.write(type=self.pick('"image"', '"thinking"', '"x"'), source=self.junk())

    def content(self, depth: int = 0) -> str | None:
        if self.chance(0.1):
            return None
        return (
            self.text()
            if self.chance(0.4)
            else self.write_list(self.some(lambda: self.block(depth)))
        )

    def response(self) -> str:
        key = self.pick("output", "result", "error", "a", "gateway_note")
        return self.write(name='"f"', response=self.write(**{key: self.text()}, b=self._maybe("1")))

    def _maybe(self, value: str) -> str | None:
        return value if self.chance(0.5) else None

    # --- messages

    def chat(self) -> str:
        messages = []
        for _ in range(self.random.randint(1, 3)):
            call = self.write(
                id='"1"', function=self.write(name=f'"{self.pick(*_NAMES)}"', arguments='"{}"')
            )
            used = self.write(
                type='"tool_use"', id='"1"', name=f'"{self.pick(*_NAMES)}"', input="{}"
            )
            said = (
                self.write_list([used, *self.some(self.block, 1)])
                if self.chance(0.4)
                else self.content()
            )
            messages.append(
                self.write(
                    role='"assistant"',
                    content=said,
                    tool_calls=self._maybe(self.write_list([call])),
                )
            )
            messages += self.some(
                lambda: self.write(role='"tool"', tool_call_id='"1"', content=self.content()), 2
            )
            messages += self.some(
                lambda: self.write(
                    role=self.pick('"user"', '"user"', '"system"'), content=self.content()
                ),
                2,
            )
        return self.write_list(messages)

    def items(self) -> str:
        if self.chance(0.1):
            return self.text()
        items = []
        for _ in range(self.random.randint(1, 3)):
            items.append(
                self.write(
                    type='"function_call"',
                    call_id='"1"',
                    name=f'"{self.pick(*_NAMES)}"',
                    arguments='"{}"',
                )
            )
            kind = self.pick(
                '"function_call_output"', '"custom_tool_call_output"', '"computer_call_output"'
            )
            items += self.some(
                lambda kind=kind: self.write(type=kind, call_id='"1"', output=self.content()),  # type: ignore[misc]
                2,
            )
            items += self.some(lambda: self.write(role='"user"', content=self.content()), 1)
        return self.write_list(items)

    def contents(self) -> str:
        contents = []
        for _ in range(self.random.randint(1, 3)):
            call = self.write(functionCall=self.write(name=f'"{self.pick(*_NAMES)}"', args="{}"))
            contents.append(self.write(role='"model"', parts=self.write_list([call])))
            contents.append(
                self.write(role=self._maybe('"user"'), parts=self.write_list(self.some(self.block)))
            )
        return self.write_list(contents)

    # --- tools

    def tool(self) -> str:
        name = f'"{self.pick(*_NAMES)}"' if self.chance(0.95) else self.junk()
        kind = self.random.randrange(8) if self.chance(0.2) else self._tools
        if kind < 3:
            return self.write(
                type='"function"', function=self.write(name=name, parameters=self._maybe("{}"))
            )
        if kind < 5:
            return self.write(
                type=self._maybe('"function"'), name=name, input_schema=self._maybe("{}")
            )
        if kind == 5:
            return self.write(toolSpec=self.write(name=name))
        if kind == 6:
            declared = self.write_list(
                self.some(lambda: self.write(name=f'"{self.pick(*_NAMES)}"'))
            )
            return self.write(functionDeclarations=declared, googleSearch=self._maybe("{}"))
        return self.pick(
            '{"type":"mcp","server_label":"a"}',
            '{"cachePoint":{}}',
            '{"type":"web_search_preview"}',
            '{"googleSearch":{}}',
        )

    def tools(self) -> str:
        return self.write_list(self.some(self.tool, 4))

    def choice(self) -> str:
        name = f'"{self.pick(*_NAMES)}"'
        return self.random.choice([
            '"auto"', '"none"', '"required"', "null", '{"type":"auto"}',
            self.write(type='"function"', function=self.write(name=name)),
            self.write(type='"tool"', name=name, disable_parallel_tool_use=self._maybe("true")),
            self.write(tool=self.write(name=name)),
            self.write(type='"allowed_tools"', mode='"auto"', tools=self.tools()),
        ])  # fmt: skip  # one list

    def config(self) -> str:
        names = self.write_list([f'"{name}"' for name in _NAMES if self.chance(0.5)])
        calling = self.write(mode='"ANY"', allowedFunctionNames=self._maybe(names))
        return self.write(functionCallingConfig=self._maybe(calling), x=self._maybe("1"))

    def body(self) -> str:
        kind = self.random.randrange(8)
        model, more = self._maybe('"m"'), self._maybe(self.junk())
        if kind < 4:
            tools, choice = self._maybe(self.tools()), self._maybe(self.choice())
            if kind == 3:
                config = self.write(tools=tools, toolChoice=choice)
                return self.write(messages=self.chat(), toolConfig=config, model=model, more=more)
            parallel = self._maybe("false")
            if kind == 2 and self.chance(0.5):
                return self.write(
                    model=model,
                    messages=self.chat(),
                    functions=tools,
                    function_call=choice,
                    more=more,
                )
            return self.write(
                model=model,
                messages=self.chat(),
                tools=tools,
                tool_choice=choice,
                parallel_tool_calls=parallel,
                more=more,
            )
        if kind < 6:
            kept = self._maybe('"r"') if self.chance(0.2) else None
            return self.write(
                input=self.items(),
                tools=self._maybe(self.tools()),
                tool_choice=self._maybe(self.choice()),
                previous_response_id=kept,
                more=more,
            )
        inner = self.write(
            contents=self.contents(),
            tools=self._maybe(self.tools()),
            toolConfig=self._maybe(self.config()),
            more=more,
        )
        return inner if kind == 6 else self.write(model=model, request=inner)

    def bytes(self) -> bytes:
        """A body in bytes: rarely cut off, invalid UTF-8, or with two conversations."""
        body = self.space() + self.body() + self.space()
        if self.chance(0.01):
            body = body.replace(
                '"more"', self.pick('"messages"', '"input"', '"contents"', '"tools"', '"request"')
            )
        data = body.encode()
        if self.chance(0.01):
            place = self.random.randrange(len(data))
            data = (
                data[:place]
                + self.random.choice((b"\x80", b"\xff", b"", b'"', b"\\", b"}", b","))
                + data[place:]
            )
        if self.chance(0.005):
            start = self.random.randrange(len(data))
            data = data[:start] + data[start + self.random.randrange(9) :]
        return data


# --- the oracle


def read(body: bytes) -> Value:
    """Parse a body, with duplicate keys and the spelling of numbers.

    Raises ValueError if it is not JSON.
    """
    text = body.decode("utf-8", "surrogateescape")
    return json.loads(
        text,
        object_pairs_hook=Members,
        parse_int=_Number,
        parse_float=_Number,
        parse_constant=_refuse,
        strict=False,
    )


class _Number(str):
    __slots__ = ()


def _refuse(_: str) -> None:
    raise ValueError


def check_steer(body: bytes) -> str:
    """Add notes to a body.

    Returns the outcome; raises WrongEditError if anything else has changed.
    """
    places: list[Place] = []

    def change(patch: Patch) -> None:
        places.extend(locate_results(patch)[-MAX_PLACES:])
        add_notes(patch, places, _WRITTEN.encode(), separated=False)

    try:
        new = b"".join(edit(_REQUEST, body, change))
    except NotEdited as why:
        return _check_reason(why.reason)
    old_value, new_value = _read_both(body, new)
    found = list(_find_notes(old_value, new_value))
    if len(found) != len(places):
        raise WrongEditError(f"{len(found)} notes in {len(places)} places")
    for path in found:
        _check_path(old_value, path)
    if not _is_rest(
        body.decode("utf-8", "surrogateescape"),
        new.decode("utf-8", "surrogateescape").split(_WRITTEN),
    ):
        raise WrongEditError("other bytes have changed")
    return "steered" if places else "no_result"


def check_narrow(body: bytes, without: frozenset[str] | None) -> str:
    """Remove tools from a body.

    Returns the outcome; raises WrongEditError if anything else has changed.
    """
    try:
        new = narrow(_REQUEST, body, Tools(without))
    except NotEdited as why:
        return _check_reason(why.reason)
    if new == body:
        return "same"
    old_value, new_value = _read_both(body, new)
    _compare_around(old_value, new_value, without)
    _check_bytes(body, new)
    if narrow(_REQUEST, new, Tools(without)) != new:
        raise WrongEditError("something was left to do")
    return "narrowed"


def _check_reason(reason: str) -> str:
    if reason not in _REASONS:
        raise WrongEditError(reason)
    return reason


def _read_both(old: bytes, new: bytes) -> tuple[Value, Value]:
    try:
        return read(old), read(new)
    except ValueError as error:
        raise WrongEditError(str(error)) from error


Path: TypeAlias = tuple[str | int, ...]

_BLOCKS: Final = (
    [("type", "text"), ("text", NOTE)],
    [("type", "input_text"), ("text", NOTE)],
    [("text", NOTE)],
)


def _find_notes(old: Value, new: Value, path: Path = ()) -> Iterator[Path]:
    """Paths to the strings that have a new note. Everything else must be equal."""
    if type(old) is not type(new):
        raise WrongEditError(f"type at {path}")
    if isinstance(old, Members):
        yield from _find_in_members(old, new, path)
    elif isinstance(old, list):
        yield from _find_in_list(old, new, path)
    elif old != new:
        if type(old) is not str or new != old + NOTE:
            raise WrongEditError(f"value at {path}")
        yield path


def _find_in_members(old: Members, new: Members, path: Path) -> Iterator[Path]:
    added = new[len(old) :]
    if [key for key, _ in new[: len(old)]] != [key for key, _ in old] or len(added) > 1:
        raise WrongEditError(f"members at {path}")
    for (key, one), (_, other) in zip(old, new, strict=False):
        yield from _find_notes(one, other, (*path, key))
    for key, value in added:
        if value != NOTE or key in dict(old):
            raise WrongEditError(f"new member at {path}")
        yield (*path, key)


def _find_in_list(old: list[Value], new: list[Value], path: Path) -> Iterator[Path]:
    if not 0 <= len(new) - len(old) <= 1 or new[len(old) :] not in (
        [],
        *[[block] for block in _BLOCKS],
    ):
        raise WrongEditError(f"elements at {path}")
    for number, (one, other) in enumerate(zip(old, new, strict=False)):
        yield from _find_notes(one, other, (*path, number))
    if len(new) > len(old):
        yield (*path, len(old), "text")


_CONTENT: Final = ("content", "parts", "output")
_RESPONSE: Final = ("functionResponse", "function_response")


def _check_path(body: Value, path: Path) -> None:
    """Check that a note is in the newest messages, in a text or result that may have one."""
    rest = path[1:] if path[:2] == ("request", "contents") else path
    if rest == ("input",):
        return
    conversation = _follow(body, path[: len(path) - len(rest) + 1])
    place, inner = rest[1], rest[2:]
    if (
        rest[0] not in {"messages", "input", "contents"}
        or not isinstance(place, int)
        or inner[0] not in _CONTENT
    ):
        raise WrongEditError(f"a note at {path}")
    if any(_is_assistant(message) for message in conversation[place:]):
        raise WrongEditError(f"a note before an assistant's message at {path}")
    for block in _follow_blocks(conversation[place], inner):
        if block is None:
            raise WrongEditError(f"a note at {path}")


def _follow_blocks(message: Value, inner: Path) -> Iterator[Value]:
    content, rest = _follow(message, inner[:1]), inner[1:]
    if not rest:
        yield content
        return
    block: Value = content[rest[0]] if int(rest[0]) < len(content) else "new"
    kind = rest[1]
    if rest[1:] == ("text",):
        yield block
    elif kind == "content" and dict(block).get("type") == "tool_result":
        yield from _follow_text(dict(block).get("content"), rest[2:])
    elif kind == "toolResult" and rest[2] == "content":
        yield from _follow_text(_follow(block, rest[1:3]), rest[3:])
    elif kind in _RESPONSE and rest[2] == "response" and len(rest) == 4:
        yield block
    else:
        yield None


def _follow_text(content: Value, rest: Path) -> Iterator[Value]:
    if not rest:
        yield "new" if content is None else content if isinstance(content, str) else None
    else:
        yield content if len(rest) == 2 and rest[1] == "text" else None


def _is_assistant(message: Value) -> bool:
    if not isinstance(message, Members):
        return False
    fields = dict(message)
    kind = fields.get("type")
    if isinstance(fields.get("role"), str) and fields["role"] and type(fields["role"]) is str:
        return fields["role"] in _ASSISTANTS
    return "call_id" in fields and type(kind) is str and kind.endswith("_call")


def _follow(value: Value, path: Path) -> Value:
    for step in path:
        value = dict(value)[str(step)] if isinstance(value, Members) else value[step]
    return value


_KEYS: Final = ('"content":"', '"gateway_note":"', '"gateway_note_":"')
_OPENINGS: Final = ('{"type":"text","text":"', '{"type":"input_text","text":"', '{"text":"', *_KEYS)
# The possible texts before a note that is not appended to a text.
_AROUND: Final = (*_OPENINGS, *["," + opening for opening in _OPENINGS])


def _is_rest(old: str, pieces: Sequence[str]) -> bool:
    if len(pieces) == 1:
        return old == pieces[0]
    first, second, *others = pieces
    for before in ("", *[around for around in _AROUND if first.endswith(around)]):
        for behind in ("",) if not before else ('"}',) if "{" in before else ('"',):
            kept = first[: len(first) - len(before)]
            if (
                old.startswith(kept)
                and second.startswith(behind)
                and _is_rest(old[len(kept) :], [second[len(behind) :], *others])
            ):
                return True
    return False


_TOOLS: Final = {"tools", "functions"}
_CHOICES: Final = {"tool_choice", "function_call", "parallel_tool_calls", "toolChoice"}
_CONFIGS: Final = {"toolConfig", "tool_config"}


def _compare_around(
    old: Value, new: Value, without: frozenset[str] | None, *, outermost: bool = True
) -> None:
    """Check that only the tools and the choice among them have changed."""
    if not isinstance(old, Members) or not isinstance(new, Members):
        raise WrongEditError("no object")
    edited = _TOOLS | _CHOICES | _CONFIGS
    wrapped = (
        outermost
        and "request" in dict(old)
        and not {"messages", "input", "contents"} & dict(old).keys()
    )
    kept = [
        (key, value)
        for key, value in old
        if key not in edited and not (wrapped and key == "request")
    ]
    if [
        (key, value)
        for key, value in new
        if key not in edited and not (wrapped and key == "request")
    ] != kept:
        raise WrongEditError("something beside the tools has changed")
    before, after = dict(old), dict(new)
    if len(after) != len(new):
        raise WrongEditError("a key stands twice")
    if wrapped:
        _compare_around(before["request"], after["request"], without, outermost=False)
        return
    for key in _TOOLS & before.keys():
        if key in after:
            _compare_tools(before[key], after[key], without)
    for key in _CONFIGS & before.keys() & after.keys():
        one, other = before[key], after[key]
        if (
            isinstance(one, Members)
            and isinstance(other, Members)
            and "tools" in dict(one)
            and "tools" in dict(other)
        ):
            _compare_tools(dict(one)["tools"], dict(other)["tools"], without)


def _compare_tools(old: Value, new: Value, without: frozenset[str] | None) -> None:
    """Check that the remaining tools are in their old order, and that the right ones are gone."""
    if old == new:
        return
    left = iter(old)
    for tool in new:
        if not any(_is_part(one, tool) for one in left):
            raise WrongEditError("a tool is new")
    declared = [names for tool in new for names in _list_declared(tool)]
    if (
        without is not None
        and len(declared) > 1
        and any(not without.isdisjoint(names) for names in declared)
    ):
        raise WrongEditError("a tool is left")  # one alone may stay where the API needs one


def _is_part(old: Value, new: Value) -> bool:
    if old == new:
        return True
    if not isinstance(old, Members) or not isinstance(new, Members):
        return False
    left = iter(old)
    for key, value in new:
        one = next((one for name, one in left if name == key), None)
        if one != value and not (
            isinstance(one, list) and isinstance(value, list) and all(item in one for item in value)
        ):
            return False
    return True


def _list_declared(tool: Value) -> list[list[str]]:
    fields = dict(tool) if isinstance(tool, Members) else {}
    named = [
        fields,
        *[
            dict(fields[key])
            for key in ("function", "toolSpec")
            if isinstance(fields.get(key), Members)
        ],
    ]
    declared = fields.get("functionDeclarations")
    groups = [named]
    if isinstance(declared, list) and not isinstance(declared, Members):
        groups += [[dict(item)] for item in declared if isinstance(item, Members)]
    names = [
        [inner["name"] for inner in group if type(inner.get("name")) is str] for group in groups
    ]
    return [found for found in names if found]


def _check_bytes(old: bytes, new: bytes) -> None:
    """Check that every member but the tools is spelled as before."""
    before, after = [_list_raw(body.decode("utf-8", "surrogateescape")) for body in (old, new)]
    edited = _TOOLS | _CHOICES | _CONFIGS | {"request"}
    if [(key, raw) for key, raw in before if key not in edited] != [
        (key, raw) for key, raw in after if key not in edited
    ]:
        raise WrongEditError("other bytes have changed")


def _list_raw(text: str) -> list[tuple[str, str]]:
    decode = json.JSONDecoder(strict=False).raw_decode
    place = text.index("{") + 1
    found: list[tuple[str, str]] = []
    while True:
        place = _skip(text, place, ",")
        if text[place] == "}":
            return found
        key, place = decode(text, place)
        start = _skip(text, place, ":")
        _, place = decode(text, start)
        found.append((key, text[start:place]))


def _skip(text: str, place: int, mark: str) -> int:
    while text[place] in " \t\r\n" or text[place] == mark:
        place += 1
    return place


# --- by hand


def try_one(seed: int) -> list[str]:
    """Edit the body of a seed in three ways.

    Returns the outcome; raises WrongEditError if one is wrong.
    """
    body = Writer(Random(seed)).bytes()
    with suppress(ValueError):
        return [
            f"steer {check_steer(body)}",
            *[f"narrow {check_narrow(body, gone)}" for gone in (frozenset({"f"}), None)],
        ]
    raise WrongEditError("an error of another kind")


def main(examples: int, first: int = 0) -> int:
    limit_integers()
    found: Counter[str] = Counter()
    wrong = 0
    for seed in range(first, first + examples):
        try:
            found.update(try_one(seed))
        except Exception as error:  # noqa: BLE001  # whatever it is, it is a finding
            wrong += 1
            print(
                f"seed {seed}: {type(error).__name__}: {error}\n  {Writer(Random(seed)).bytes()!r}",
                flush=True,
            )
        if (seed + 1 - first) % 100_000 == 0:
            print(f"{seed + 1 - first} tried, {wrong} wrong", flush=True)
    print(f"{examples} tried, {wrong} wrong; {dict(found.most_common())}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
