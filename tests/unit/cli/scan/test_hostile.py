"""Hostile files, packed or not, are read in bounded memory; problems are counted and named."""

import gzip
import json
import os
import socket
import sys
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.access_logs import USER, make_record
from tests.support.command import Run, written
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.examples import examples
from tests.support.scanning import scan_file, scan_values
from tests.support.transcripts import (
    FAILING,
    FORMATS,
    AgentSession,
    write_claude_code,
    write_codex,
    write_gemini_cli,
    write_lines,
    write_otlp,
    write_requests,
)
from tests.support.turn_writers import Did

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SESSION = AgentSession([FAILING] * 8)
FOUND = [("repeat", 1, 4, 8, 8)]
LONGEST = 2**20


def join(lines: list[Any]) -> bytes:
    return b"".join(
        [line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines]
    )


LINES = [join([line]) for line in write_claude_code(SESSION)]
ROLLOUT = [join([line]) for line in write_codex(SESSION)]
PACKED = zstd.compress(join(ROLLOUT), 19)
FRAMES = zstd.compress(join(ROLLOUT[:5])) + zstd.compress(join(ROLLOUT[5:]))
TWO_GIB_WINDOW = (
    b"\x28\xb5\x2f\xfd\x00\xa8\x01\x00\x00"  # magic, no checksum, the window, and an empty block
)
HEAD, *MESSAGES = write_gemini_cli(SESSION)
INDENTED = json.dumps(
    {**HEAD, "messages": [line for line in MESSAGES if "$set" not in line]}, indent=1
).encode()
LONG_LINE = b'{"type":"user","x":"' + b"x" * 90_000 + b'"}\n'
DEEP_VALUE = b'{"arrayValue":{"values":[' * 200 + b'{"stringValue":"x"}' + b"]}}" * 200
DEEP_SPAN = b'{"attributes":[{"key":"gen_ai.input.messages","value":' + DEEP_VALUE + b"}]}"
DEEP_EXPORT = b'{"resourceSpans":[{"scopeSpans":[{"spans":[' + DEEP_SPAN + b"]}]}]}\n"
FILES: dict[
    str, tuple[bytes, int, list[tuple[Any, ...]], dict[str, int]]
] = {  # bytes, longest line, loops, problems
    "damaged lines": (
        join(
            [
                LINES[0],
                b'{"type":"user","mess\n',
                b"not json\n",
                b'{"a":\x80\xff}\n',
                b"[1,2\n",
                *LINES[1:],
                LINES[-1][:40],
            ]
        ),
        LONGEST,
        FOUND,
        {"not_json": 5},
    ),
    "a damaged first line": (join([b'{"type":"us\n', *LINES]), LONGEST, FOUND, {"not_json": 1}),
    "long lines": (
        join([LINES[0], LONG_LINE, *LINES[1:4], LONG_LINE, *LINES[4:]]),
        50_000,
        FOUND,
        {"too_long": 2},
    ),
    "a long document": (
        json.dumps([{"messages": "x" * 100}] * 90, indent=1).encode(),
        2_000,
        [],
        {"too_long": 1},
    ),
    "deeply nested values": (
        join([(b'{"messages":' + b"[" * 200_000 + b"]" * 200_000 + b"}\n"), DEEP_EXPORT, *LINES]),
        LONGEST,
        FOUND,
        {"not_json": 1, "unread": 1},
    ),
    "a program": (b"\x7fELF\0\0", LONGEST, [], {"foreign": 1}),
    "a script": (b"#!/bin/sh\ntouch owned\n", LONGEST, [], {"foreign": 1}),
    "a picture": (b"\x89PNG\r\n", LONGEST, [], {"foreign": 1}),
    "zeros": (b"\0" * 99, LONGEST, [], {"foreign": 1}),
    "a table": (b"a,b\n1,2\n", LONGEST, [], {"foreign": 1}),
    "blanks": (b"  \n\n", LONGEST, [], {}),
    "the start of a magic number": (b"\x28\xb5", LONGEST, [], {"foreign": 1}),
    "JSON of another kind": (b'{"name": "x", "version": 1}', LONGEST, [], {"unknown": 1}),
    "gzip": (gzip.compress(join(LINES)), LONGEST, FOUND, {}),
    "gzip, cut off": (
        gzip.compress(join(LINES))[:-30],
        LONGEST,
        [("repeat", 1, 4, 0, 7)],
        {"damaged": 1},
    ),
    "zstd": (PACKED, LONGEST, FOUND, {}),
    "zstd in two frames": (FRAMES, LONGEST, FOUND, {}),
    "zstd, cut off": (PACKED[:-9], LONGEST, [], {"damaged": 1}),
    "zstd, damaged": (PACKED[:40] + b"\0" * 60 + PACKED[100:], LONGEST, [], {"damaged": 1}),
    "zstd with a window above that of its command": (TWO_GIB_WINDOW, LONGEST, [], {"damaged": 1}),
    "zstd of an indented document": (zstd.compress(INDENTED), LONGEST, FOUND, {}),
    "zstd with a damaged first line": (
        zstd.compress(b'{"broken\n' + join(ROLLOUT)),
        LONGEST,
        FOUND,
        {"not_json": 1},
    ),
}


@pytest.mark.parametrize(("data", "longest", "loops", "problems"), FILES.values(), ids=FILES)
def test_readable_part_of_a_file_is_used(
    data: bytes,
    longest: int,
    loops: list[tuple[Any, ...]],
    problems: dict[str, int],
    tmp_path: Path,
) -> None:
    (tmp_path / "f").write_bytes(data)

    scanned = scan_file(tmp_path / "f", longest)

    assert scanned.loops == loops
    assert {kind: found.count for kind, found in scanned.problems.items()} == problems


def test_problems_have_places_and_names(tmp_path: Path) -> None:
    long = scan_values(
        tmp_path, [LINES[0], b"not json\n", *LINES[1:3], {"name": "x", "version": 1}]
    )

    assert str(long.problems["not_json"].places[0]).endswith("lines.jsonl:2")
    assert long.problems["unknown"].names == {"an object with name, version": 1}
    assert scan_file(tmp_path / "gone").problems["unreadable"].names == {
        "No such file or directory": 1
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "size", "most"),
    [(LINES[0], 2**28, 2**25), (gzip.compress(b"{" + b" " * 2**26), 0, 2**24)],
    ids=["sparse", "gzip"],
)
def test_long_line_takes_no_memory(data: bytes, size: int, most: int, tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(data)
    os.truncate(file, size or len(data))
    tracemalloc.start()

    scanned = scan_file(file, longest=2**16)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (scanned.count("too_long"), scanned.read) == (1, file.stat().st_size)
    assert peak < most


@pytest.mark.slow
@pytest.mark.parametrize(
    "data", [b"{}\n" * 2**18, b'{"a":"' + b"x" * 2**22], ids=["lines", "one line"]
)
def test_zstd_bomb_is_not_read_to_its_end(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = [0]

    class Counted(zstd.ZstdFile):
        def readline(self, size: int | None = -1, /) -> bytes:
            line = super().readline(-1 if size is None else size)
            read[0] += len(line)
            return line

    monkeypatch.setattr("extproc.cli.packed._FREE", 2**16)
    monkeypatch.setattr("extproc.cli.packed.zstd.ZstdFile", Counted)
    (tmp_path / "bomb").write_bytes(zstd.compress(data))

    assert scan_file(tmp_path / "bomb", longest=2**18).count("bomb") == 1
    assert read[0] < len(data)


@pytest.mark.parametrize(
    ("cut", "code", "said"), [(None, 0, "3 requests in 3 lines"), (-5, 1, "cut off")]
)
def test_replay_reads_zstd(
    cut: int | None, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "p.json", policy("p", ANY, **USER))
    log = written(tmp_path / "log", zstd.compress(join([make_record()] * 3))[:cut])

    run = Run(capsys, "replay", "--policy", file, "--strict", log)

    assert (run.code, said in run.out + run.err) == (code, True)


HALVES = {"high": "\ud83d", "low": "\ude00", "two": "\ud83d\ud83d"}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("where", ["lines", "document", "text", "otlp"])
def test_half_surrogate_pairs_hide_no_loop(where: str, half: str, tmp_path: Path) -> None:
    session = AgentSession(
        [Did(FAILING.calls, (f"Error: part 1 is broken {HALVES[half]}. " + "It is. " * 30,))] * 8
    )
    lines: dict[str, list[Any]] = {
        "lines": write_claude_code(session),
        "document": [json.dumps(write_claude_code(session), indent=1).encode()],
        "text": [
            {**line, "request": json.dumps(line["request"])}
            for line in write_requests(session, "chat")
        ],
        "otlp": write_otlp(session),
    }

    scanned = scan_values(tmp_path, lines[where])

    assert ([loop[0] for loop in scanned.loops], scanned.count("not_json")) == (["repeat"], 0)


ODD: list[Any] = [
    None,
    True,
    0,
    -1.5,
    1e300,
    "",
    "x",
    [],
    {},
    [[]],
    {"a": {}},
    10**30,
    "\ud800",
    "9" * 900,
]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_values_of_wrong_types_raise_nothing(name: str, tmp_path: Path) -> None:
    random = Random(8)

    def spoil(value: Any) -> Any:  # noqa: ANN401  # JSON
        if random.random() < 0.08:
            return random.choice(ODD)
        if isinstance(value, dict):
            return {key: spoil(inner) for key, inner in value.items()}
        return [spoil(inner) for inner in value] if isinstance(value, list) else value

    for _ in range(examples(60)):
        scan_values(tmp_path, [spoil(line) for line in FORMATS[name](SESSION)])


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_bytes_raise_nothing(name: str, tmp_path: Path) -> None:
    random = Random(9)
    data = join(FORMATS[name](SESSION))
    for _ in range(examples(40)):
        damaged = bytearray(data)
        for _ in range(random.randrange(1, 30)):
            damaged[random.randrange(len(damaged))] = random.randrange(256)
        scan_values(tmp_path, [bytes(damaged)])


# ---- Folders and links


def scan(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[list[str], dict[str, int]]:
    report = json.loads(Run(capsys, "scan", "--json", "--jobs", "1", *map(str, paths)).out)
    names = [Path(found["place"].rpartition(":")[0]).name for found in report["found"]]
    assert report["files"] == len(names)
    return names, {kind: found["count"] for kind, found in report["problems"].items()}


def test_links_in_circles_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "a" / "one.jsonl", write_claude_code(SESSION))
    (tmp_path / "a" / "circle").symlink_to(tmp_path)
    (tmp_path / "a" / "again.jsonl").symlink_to(tmp_path / "a" / "one.jsonl")
    (tmp_path / "self").symlink_to(tmp_path / "self")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")

        assert scan(capsys, tmp_path, tmp_path / "a") == (["again.jsonl"], {"unreadable": 2})


def test_links_out_of_the_folder_are_not_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inside, outside = tmp_path / "in", tmp_path / "in-other"
    write_lines(outside / "secret.jsonl", write_claude_code(SESSION))
    write_lines(inside / "deep" / "own.jsonl", write_claude_code(SESSION))
    links: dict[str, Path | str] = {
        "file.jsonl": outside / "secret.jsonl",
        "folder": outside,
        "relative": "../in-other/secret.jsonl",
        "deep/twice": "../folder/secret.jsonl",
        "within": inside / "deep",
        "../given": inside,
    }
    for link, target in links.items():
        (inside / link).symlink_to(target)

    assert scan(capsys, inside) == scan(capsys, tmp_path / "given") == (["own.jsonl"], {"link": 4})
    assert scan(capsys, inside / "file.jsonl") == (["file.jsonl"], {})


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_folder_that_cannot_be_listed_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "closed").mkdir(mode=0)

    assert scan(capsys, tmp_path) == ([], {"unreadable": 1})


USUAL = [".claude/projects", ".codex/sessions", ".codex/archived_sessions", ".gemini/tmp"]


@pytest.mark.parametrize(
    ("homes", "folders", "said"),
    [
        ({}, USUAL, f"scanning {' and '.join(f'HOME/{place}' for place in USUAL)}"),
        ({}, USUAL[2:3], "scanning HOME/.codex/archived_sessions"),
        ({}, [], "loopguard: no transcripts in ~/.claude/projects or ~/.codex/sessions"),
        (
            {"CLAUDE_CONFIG_DIR": "HOME/c", "CODEX_HOME": "HOME/x/", "GEMINI_CLI_HOME": ""},
            ["c/projects", "x/archived_sessions", *USUAL],
            "scanning HOME/c/projects and HOME/x/archived_sessions and HOME/.gemini/tmp",
        ),
    ],
)
def test_default_folders_are_scanned_without_a_path(
    homes: dict[str, str],
    folders: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "GEMINI_CLI_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, home in homes.items():
        monkeypatch.setenv(name, home.replace("HOME", str(tmp_path)))
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)

    assert Run(capsys, "scan").err.replace(str(tmp_path), "HOME").startswith(said)
