"""Log lines, and the limit on their rate."""

import json
import logging
from collections.abc import Iterator
from enum import Enum

import pytest

from extproc.logs import LogFormat, RateLimit, make_extra, setup


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before


def written(
    capsys: pytest.CaptureFixture[str], log_format: LogFormat, message: str, **values: object
) -> str:
    setup(log_format, "info")
    logging.getLogger("loopguard").warning(message, extra=make_extra(**values))
    logging.getLogger("loopguard").debug("below the level")
    out, line = capsys.readouterr()
    assert out == ""
    return line


@pytest.mark.parametrize(
    ("most", "times", "admitted"),
    [
        (
            2,
            (10.0, 10.1, 10.2, 10.9, 11.0, 11.5, 11.6, 13.0, 13.1, 14.0),
            [0, 0, None, None, 2, 0, None, 1, 0, 0],
        ),
        (1, (0.0, 0.5, 1e9), [0, None, 1]),
    ],
    ids=["a bounded number each second", "a clock that starts at zero"],
)
def test_rate_limit_reports_how_many_it_dropped(
    most: int, times: tuple[float, ...], admitted: list[int | None]
) -> None:
    limit = RateLimit(most)

    assert [limit.admit(now) for now in times] == admitted


def test_text_line_has_time_level_message_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    line = written(capsys, "text", "loop detected", policy="p", count=3, tenant=None)

    stamp, _, rest = line.partition(" ")
    assert len(stamp) == len("2026-06-01T00:00:00.000Z")
    assert stamp.endswith("Z")
    assert rest == "warning loop detected policy=p count=3\n"


def test_json_line_keeps_the_types_of_fields(capsys: pytest.CaptureFixture[str]) -> None:
    line = json.loads(
        written(capsys, "json", "loop detected", policy="p", count=3, tenant=None, odd=1 + 2j)
    )

    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "message": "loop detected",
        "policy": "p",
        "count": 3,
        "odd": "(1+2j)",
    }


Color = Enum("Color", ["RED"])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"x-team": "blue", "n": 1}, '{"x-team": "blue", "n": 1}'),
        ({"x-team": "the\nblue"}, '{"x-team": "the\\nblue"}'),
        (["a", "b"], '["a", "b"]'),
        (("a", None), '["a", null]'),
        ({"b", "a"}, '["a", "b"]'),
        (frozenset({"a"}), '["a"]'),
        ({}, "{}"),
        (True, "true"),
        (1.5, "1.5"),
        (3, "3"),
        ({"of": {"b", "a"}}, '{"of": ["a", "b"]}'),
        ("plain", "plain"),
        ("with space", '"with space"'),
        (Color.RED, '"Color.RED"'),
    ],
)
def test_values_in_logs_are_json_or_plain_text(
    capsys: pytest.CaptureFixture[str], value: object, text: str
) -> None:
    formats: tuple[LogFormat, LogFormat] = ("text", "json")
    lines = [written(capsys, log_format, "m", labels=value) for log_format in formats]

    assert lines[0].partition("labels=")[2] == f"{text}\n"
    assert json.loads(lines[1])["labels"] == (
        json.loads(text) if text[0] in '{["0123456789t' else text
    )


HOSTILE = [
    "a\nb",
    "a\r\n2026-06-01T00:00:00.000Z error   forged",
    'say "hi"',
    "a=b c=d",
    "",
    "\x1b[31m",
    "\u2028",
    "\udcff",
    "\x00",
    "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x202E, 0xD800, 0x1F600])),
    "\x1b]0;owned\x07\x9b2J\x7f\r\u202e",
]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_value_can_break_a_line(
    capsys: pytest.CaptureFixture[str], log_format: LogFormat, value: str
) -> None:
    line = written(capsys, log_format, f"m {value}", field=value, last="end")

    text = line.removesuffix("\n")
    assert text.isprintable()
    if log_format == "json":
        assert json.loads(text)["field"] == value
    else:
        quoted, last = text.rsplit(" last=", 1)
        assert last == "end"
        assert json.loads(quoted.rsplit(" field=", 1)[1]) == value


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_exception_is_logged_and_escaped(
    capsys: pytest.CaptureFixture[str], log_format: LogFormat
) -> None:
    setup(log_format, "info")
    try:
        int("boom\x1b[2J")
    except ValueError:
        logging.getLogger("loopguard").exception("failed")

    shown = capsys.readouterr().err
    assert all(line.isprintable() for line in shown.splitlines())
    first, *rest = shown.splitlines()
    if log_format == "json":
        assert json.loads(first)["exception"].endswith(r"base 10: 'boom\x1b[2J'")
    else:
        assert first.endswith("error   failed")
        assert (rest[0], rest[-1][-12:]) == ("Traceback (most recent call last):", r"boom\x1b[2J'")


def test_lines_below_the_level_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    setup("text", "error")
    logging.getLogger("loopguard").warning("too mild")
    setup("text", "debug")
    logging.getLogger("watchfiles.main").info("1 change detected")
    logging.getLogger("loopguard").debug("small")

    assert [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "debug   small"
    ]
