"""Bodies of every API: real ones, random ones, and hostile ones."""

import json
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from hypothesis import strategies as st

from extproc.request.document import MAX_DIGITS, MAX_STEPS

Example = TypeVar("Example")


class Draw(Protocol):
    def __call__(self, strategy: st.SearchStrategy[Example], /) -> Example:
        pass


class Number(NamedTuple):
    """A JSON number by its value: `mantissa` times ten to the power of `exponent`."""

    mantissa: int
    exponent: int


INTEGERS = st.one_of(st.integers(-3, 3), st.integers(), st.integers(-(10**600) + 1, 10**600 - 1))


NUMBERS = st.builds(Number, INTEGERS, st.integers(-4, 4) | st.integers(-700, 700))


# Few letters, so that equal keys and strings are common, and all that escapes may be needed for.
TEXTS = st.text(st.sampled_from('ab/1"\\\n\t\x00\x7f\x85é\u2028\ufeff\uffff😀')) | st.text()


SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS


VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


_SPACES = ("", "", " ", "\n\t", "\r\n  ")


def spelled_text(draw: Draw, text: str) -> str:
    short = {
        '"': '\\"',
        "\\": "\\\\",
        "/": "\\/",
        "\b": "\\b",
        "\f": "\\f",
        "\n": "\\n",
        "\r": "\\r",
        "\t": "\\t",
    }
    found = []
    # One for each character would take most of a test's time
    chosen = draw(st.integers(0, 4 ** len(text) - 1))
    for character in text:
        units = character.encode("utf-16-be").hex()
        escaped = "".join(f"\\u{units[place : place + 4]}" for place in range(0, len(units), 4))
        ways = [escaped, escaped.upper().replace("\\U", "\\u")]
        if character in short:
            ways.append(short[character])
        if character >= " " and character not in '"\\':
            ways.append(character)
        found.append(ways[-1 - chosen % 4 % len(ways)])
        chosen //= 4
    return '"' + "".join(found) + '"'


def spelled_number(draw: Draw, number: Number) -> str:
    zeros = draw(st.integers(0, 3)) if number.mantissa else 0
    digits, exponent = str(abs(number.mantissa)) + "0" * zeros, number.exponent - zeros
    point = draw(st.integers(0, len(digits)))
    if point == 0:
        before = draw(st.integers(0, 3))
        text, power = f"0.{'0' * before}{digits}", exponent + len(digits) + before
    elif point < len(digits):
        text, power = f"{digits[:point]}.{digits[point:]}", exponent + len(digits) - point
    else:
        text, power = digits + draw(st.sampled_from(["", ".0", ".000"])), exponent
    sign = "-" if number.mantissa < 0 or (number.mantissa == 0 and draw(st.booleans())) else ""
    spellings = [
        f"{mark}{plus}{abs(power):0{width}}"
        for mark in "eE"
        for plus in ("-" if power < 0 else "", "-" if power < 0 else "+")
        for width in (1, 4)
    ]
    if power == 0:
        spellings.append("")
    if number.mantissa and "." not in text and 0 < power <= MAX_DIGITS - len(text):
        text, spellings = text + "0" * power, ["", ".0", "e0"]
    return sign + text + draw(st.sampled_from(spellings))


def spelled(draw: Draw, value: Any) -> str:  # noqa: ANN401  # any JSON value
    """Any JSON text of a value."""
    # As above, for the space around up to 64 values and names
    chosen = draw(st.integers(0, len(_SPACES) ** 64 - 1))
    found = [_SPACES[chosen // len(_SPACES) ** place % len(_SPACES)] for place in range(64)]
    return _spelled(draw, value, cycle(found))


def _spelled(draw: Draw, value: Any, space: Iterator[str]) -> str:  # noqa: ANN401  # any JSON value
    if value is None or isinstance(value, bool):
        text = json.dumps(value)
    elif isinstance(value, str):
        text = spelled_text(draw, value)
    elif isinstance(value, Number | int):
        text = spelled_number(draw, value if isinstance(value, Number) else Number(value, 0))
    elif isinstance(value, list):
        text = "[" + ",".join(_spelled(draw, item, space) for item in value) + next(space) + "]"
    else:
        items = draw(st.permutations(list(value.items())))
        members = [
            f"{next(space)}{spelled_text(draw, name)}{next(space)}:{_spelled(draw, item, space)}"
            for name, item in items
        ]
        text = "{" + ",".join(members) + next(space) + "}"
    return next(space) + text + next(space)


BODIES = {
    file.stem: file.read_bytes()
    for file in sorted((Path(__file__).parent / "bodies").glob("*.json"))
}


# Bodies near those of the APIs, in which nearly anything may stand in nearly any place.
WORDS = st.sampled_from(
    ["", "a", "A  b", "user", "assistant", "tool", "text", "é", "null", "{}", '{"a":1.0}', "f"]
)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.sampled_from([0.5, 1.0]) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=3,
)


_TYPES = st.sampled_from(
    [
        "text",
        "tool_use",
        "tool_result",
        "thinking",
        "image",
        "input_text",
        "function_call",
        "function_call_output",
        "reasoning",
    ]
)


def near_to(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of these fields, sometimes of another type."""
    wild = {name: st.one_of(value, value, value, ANYTHING) for name, value in fields.items()}
    return st.fixed_dictionaries({}, optional=wild)


_TOOLS = near_to({"name": WORDS, "arguments": WORDS, "input": WORDS})


_CHAT_CALLS = st.lists(
    near_to({"id": WORDS, "type": WORDS, "function": _TOOLS, "custom": _TOOLS}), max_size=3
)


_BLOCKS = st.lists(
    near_to(
        {
            "type": _TYPES,
            "text": WORDS,
            "id": WORDS,
            "name": WORDS,
            "input": ANYTHING,
            "tool_use_id": WORDS,
            "content": WORDS,
            "is_error": st.booleans(),
        }
    ),
    max_size=3,
)


_MESSAGES = st.lists(
    near_to(
        {
            "role": st.sampled_from(["user", "assistant", "tool", "system", "function"]),
            "type": _TYPES,
            "content": WORDS | _BLOCKS,
            "tool_calls": _CHAT_CALLS,
            "tool_call_id": WORDS,
            "function_call": _TOOLS,
            "call_id": WORDS,
            "name": WORDS,
            "arguments": WORDS,
            "output": WORDS | _BLOCKS,
            "refusal": WORDS,
        }
    ),
    max_size=5,
)


REQUESTS = st.fixed_dictionaries({"messages": _MESSAGES}) | st.fixed_dictionaries(
    {"input": _MESSAGES}
)


MIB = 2**20


def chat_body(*messages: str, model: str = '"m"', more: str = "") -> bytes:
    return f'{{"model":{model},{more}"messages":[{",".join(messages)}]}}'.encode(
        "utf-8", "surrogatepass"
    )


def tool_call(arguments: str = '"{}"', name: str = '"f"', identity: str = '"1"') -> str:
    function = f'{{"name":{name},"arguments":{arguments}}}'
    call = f'{{"id":{identity},"type":"function","function":{function}}}'
    return f'{{"role":"assistant","tool_calls":[{call}]}}'


def _result(content: str = '"x"', identity: str = '"1"') -> str:
    return f'{{"role":"tool","tool_call_id":{identity},"content":{content}}}'


def user_message(content: str = '"hi"') -> str:
    return f'{{"role":"user","content":{content}}}'


def _nested(depth: int, inner: str = "1") -> str:
    return "[" * depth + inner + "]" * depth


def _repeated(call: str, *results: str, times: int = 3) -> bytes:
    return chat_body(user_message(), *[call, *results] * times)


_PARTS = '[{"type":"text","text":"x"},{"type":"image","source":{"data":"AAAA"}}]'


_FUNCTION = '"function":{"name":"f","arguments":"{}"}'


_CALLS = ",".join([f'{{"id":"{n}",{_FUNCTION}}}' for n in range(5_000)])
_PARALLEL = f'{{"role":"assistant","tool_calls":[{_CALLS}]}}'


Reasons = set[str]


NONE: Reasons = set()


NOT_JSON = {"not_json"}


LIMIT = {"inspect_limit"}


NO_MESSAGES = {"no_messages"}


# name -> (how it is made, why detectors leave it uncounted, whether the first such request is
# refused)
HOSTILE: dict[str, tuple[Callable[[], bytes], Reasons, bool]] = {
    "5 MB of open arrays": (lambda: b"[" * 5_000_000, LIMIT, False),
    "5 MB of nested arrays": (lambda: _nested(2_500_000).encode(), LIMIT, False),
    "5 MB of nested objects": (lambda: b'{"a":' * 1_000_000, LIMIT, False),
    "1 MiB of nested arrays": (lambda: _nested(MIB // 2 - 1).encode(), LIMIT, False),
    "nested arrays": (lambda: _nested(40_000).encode(), NOT_JSON, False),
    "nested arrays in a message": (
        lambda: chat_body(user_message(_nested(40_000))),
        NOT_JSON,
        False,
    ),
    "nested arrays in an unread field": (
        lambda: chat_body(user_message(), more=f'"x":{_nested(40_000)},'),
        NOT_JSON,
        False,
    ),
    "nested objects": (lambda: b'{"messages":' * 40_000 + b"1" + b"}" * 40_000, NOT_JSON, False),
    "open arrays": (lambda: b"[" * 40_000, NOT_JSON, False),
    "deep arrays": (lambda: chat_body(user_message(_nested(900))), NONE, False),
    "deep arguments": (lambda: _repeated(tool_call(_nested(900)), _result()), NONE, True),
    "deep arguments in a string": (
        lambda: _repeated(tool_call(f'"{_nested(20_000)}"'), _result()),
        NONE,
        True,
    ),
    "deep results": (lambda: _repeated(tool_call(), _result(_nested(900))), NONE, True),
    "a million tiny messages": (lambda: chat_body(*["{}"] * 1_000_000), LIMIT, False),
    "a million messages that are none": (lambda: chat_body(*["1"] * 1_000_000), LIMIT, False),
    "many tiny messages": (lambda: chat_body(*["{}"] * 20_000), LIMIT, False),
    "many messages that are none": (lambda: chat_body(*["1"] * 20_000), NO_MESSAGES, False),
    "many empty texts": (
        lambda: chat_body(user_message("[" + ",".join(['""'] * 20_000) + "]")),
        LIMIT,
        False,
    ),
    "a 2 MB argument string": (
        lambda: chat_body(tool_call(json.dumps(json.dumps(["x" * 2_000_000])))),
        LIMIT,
        False,
    ),
    "a long argument string": (
        lambda: _repeated(tool_call(json.dumps(json.dumps(["\n" * 50_000]))), _result()),
        NONE,
        True,
    ),
    "arguments in arguments": (
        lambda: _repeated(tool_call(json.dumps(json.dumps(json.dumps(["é"])))), _result()),
        NONE,
        True,
    ),
    "invalid UTF-8 in a text": (
        lambda: chat_body(user_message('"?"')).replace(b"?", b"\xff\xfe"),
        NOT_JSON,
        False,
    ),
    "invalid UTF-8 where few look": (
        lambda: chat_body(user_message(), more='"?":1,').replace(b"?", b"\xc3"),
        NONE,
        False,
    ),
    "invalid UTF-8 in a role": (
        lambda: chat_body('{"role":"?"}').replace(b"?", b"\xc0\x80"),
        NOT_JSON,
        False,
    ),
    "invalid UTF-8 in arguments": (
        lambda: _repeated(tool_call('"?"'), _result()).replace(b"?", b"\x80"),
        NOT_JSON,
        False,
    ),
    "encoded surrogates": (lambda: chat_body(user_message('"\ud800"')), NOT_JSON, False),
    "half a pair in a text": (lambda: chat_body(user_message('"\\ud800"')), NONE, False),
    "half a pair in a key": (lambda: chat_body(user_message(), more='"\\udfff":1,'), NONE, False),
    "half a pair in the model": (lambda: chat_body(user_message(), model='"\\ud800"'), NONE, False),
    "half a pair in a name": (
        lambda: _repeated(tool_call(name='"\\udc00"'), _result()),
        NONE,
        True,
    ),
    "half a pair in arguments": (
        lambda: _repeated(tool_call('"{\\"a\\":\\"\\\\ud800\\"}"'), _result()),
        NONE,
        True,
    ),
    "NaN": (lambda: chat_body(user_message(), more='"x":NaN,'), NOT_JSON, False),
    "NaN in arguments": (lambda: _repeated(tool_call('{"a":NaN}'), _result()), NOT_JSON, False),
    "NaN in an argument string": (
        lambda: _repeated(tool_call('"{\\"a\\":NaN}"'), _result()),
        NONE,
        True,
    ),
    "infinity": (lambda: chat_body(user_message(), more='"x":-Infinity,'), NOT_JSON, False),
    "a huge exponent": (
        lambda: chat_body(user_message("[1e999999999,-1e-999999999]")),
        NONE,
        False,
    ),
    "an exponent of many digits": (
        lambda: chat_body(user_message(f"[1e{'9' * 2_000}]")),
        NOT_JSON,
        False,
    ),
    "a huge integer": (lambda: chat_body(user_message(f"[{'9' * MAX_DIGITS}]")), NONE, False),
    "an integer too long": (lambda: chat_body(user_message(f"[{'9' * 100_000}]")), NOT_JSON, False),
    "an integer too long as an argument": (
        lambda: _repeated(tool_call(f'"{"9" * 5_000}"'), _result()),
        NONE,
        True,
    ),
    "a fraction of a million digits": (
        lambda: chat_body(user_message(f"[0.{'7' * 1_000_000}]")),
        NONE,
        False,
    ),
    "too many fractions": (
        lambda: chat_body(user_message(f"[{','.join(['0.5'] * (MAX_STEPS + 1))}]")),
        LIMIT,
        False,
    ),
    "a byte order mark": (lambda: b"\xef\xbb\xbf" + chat_body(user_message()), NONE, False),
    "UTF-16": (lambda: chat_body(user_message()).decode().encode("utf-16"), NONE, False),
    "garbage behind": (lambda: chat_body(user_message()) + b"}", NOT_JSON, False),
    "two bodies": (lambda: chat_body(user_message()) * 2, NOT_JSON, False),
    "cut off": (lambda: chat_body(user_message())[:-1], NOT_JSON, False),
    "zeros": (lambda: bytes(10_000), NOT_JSON, False),
    "space": (lambda: b" \n\t\r" * 10_000, NOT_JSON, False),
    "quotes": (lambda: b'"' * 100_000, NOT_JSON, False),
    "nothing": (lambda: b"", NO_MESSAGES, False),
    "null": (lambda: b"null", NO_MESSAGES, False),
    "null everywhere": (
        lambda: chat_body(
            '{"role":null,"content":null,"tool_calls":null,"type":null,"tool_call_id":null,"name":null,"refusal":null}',
            '{"role":"assistant","tool_calls":[null,{"id":null,"function":null},{"function":{"name":null,"arguments":null}}]}',
            '{"role":"user","content":[null,{"type":null},{"type":"text","text":null},{"type":"tool_use","input":null}]}',
            "null",
            model="null",
        ),
        NONE,
        False,
    ),
    "a model of another type": (lambda: chat_body(user_message(), model="[1,{}]"), NONE, False),
    "a huge model": (
        lambda: chat_body(user_message(), model='"' + "m" * 100_000 + '"'),
        {"descriptor_too_long"},
        False,
    ),
    "too many keys": (
        lambda: json.dumps({f"{n}": 0 for n in range(60_000)}).encode(),
        LIMIT,
        False,
    ),
    "one key again and again": (
        lambda: b"{" + b",".join([b'"messages":[]'] * 50_000) + b"}",
        NO_MESSAGES,
        False,
    ),
    "keys in escapes": (
        lambda: _repeated(tool_call(), _result()).replace(b'"t', b'"\\u0074'),
        NONE,
        True,
    ),
    "a huge tool name": (
        lambda: _repeated(tool_call(name='"' + "n" * 200_000 + '"'), _result()),
        NONE,
        True,
    ),
    "a tool name that is a header": (
        lambda: _repeated(tool_call(name=('"a\\r\\nx: y\\u0000\\u202e"')), _result()),
        NONE,
        True,
    ),
    "an empty tool name": (lambda: _repeated(tool_call(name='""'), _result()), NONE, True),
    "thousands of parallel calls": (
        lambda: chat_body(_PARALLEL, *[_result(identity=f'"{n}"') for n in range(5_000)]),
        LIMIT,
        False,
    ),
    "one id in every turn": (lambda: _repeated(tool_call(), _result(), times=500), NONE, True),
    "no ids": (lambda: _repeated(tool_call(identity='""'), _result(identity='""')), NONE, True),
    "no results": (lambda: _repeated(tool_call()), NONE, False),
    "results alone": (lambda: _repeated(_result()), NONE, False),
    "results in parts": (lambda: _repeated(tool_call(), _result(_PARTS)), NONE, True),
    "results of every type": (
        lambda: _repeated(tool_call(), _result('{"a":[1,null]}')),
        NONE,
        True,
    ),
    "a server's history": (
        lambda: b'{"model":"m","previous_response_id":"r","input":[1,{},null,[]]}',
        {"no_history"},
        False,
    ),
    "an endless prompt": (
        lambda: b'{"model":"m","prompt":[' + b"0," * 200_000 + b"0]}",
        {"no_history"},
        False,
    ),
}
