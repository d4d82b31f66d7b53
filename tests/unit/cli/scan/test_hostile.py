"""Whatever stands in files, it is read in bounded memory, counted and named; nothing is run, and nothing raises."""

from __future__ import annotations

import gzip
import json
import os
import socket
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import pytest

from extproc.cli.scan.files import choose_paths, find_files
from extproc.cli.scan.lines import UnreadLines
from extproc.errors import UsageError
from tests.support.scanning import scan_file, scan_values
from tests.support.transcripts import FORMATS, AgentSession, write_claude_code, write_lines
from tests.support.turn_writers import Did

FAILING = Did((("check", {"part": 1}),), ("Error: part 1 is broken. " + "It is. " * 30,))
SESSION = AgentSession([FAILING] * 8)
FOUND = [("repeat", 1, 4, 8, 8)]
LINES = [json.dumps(line).encode() + b"\n" for line in write_claude_code(SESSION)]


class TestLines:
    """Lines that cannot be used do not disturb the others."""

    def test_damaged_lines(self, tmp_path: Path) -> None:
        """Lines that are cut off, or garbled, are counted with their places."""
        damaged = [b'{"type":"user","mess\n', b"not json\n", b'{"a":\x80\xff}\n', b"[1,2\n"]

        scanned = scan_values(tmp_path, [LINES[0], *damaged, *LINES[1:], LINES[-1][:40]])

        assert scanned.loops == FOUND
        assert scanned.count("not_json") == 5
        assert str(scanned.problems["not_json"].places[0]).endswith("lines.jsonl:2")

    def test_the_first_line_may_be_damaged(self, tmp_path: Path) -> None:
        """A file whose first line is no JSON is tried as a document, then as lines."""
        assert scan_values(tmp_path, [b'{"type":"us\n', *LINES]).loops == FOUND

    def test_long_lines_are_skipped(self, tmp_path: Path) -> None:
        """A line above the limit is counted, and the next one read."""
        file = tmp_path / "f"
        long = b'{"type":"user","x":"' + b"x" * 90_000 + b'"}\n'
        file.write_bytes(b"".join([LINES[0], long, *LINES[1:4], long, *LINES[4:]]))

        scanned = scan_file(file, longest=50_000)

        assert scanned.loops == FOUND
        assert scanned.count("too_long") == 2
        assert [place.line for place in scanned.problems["too_long"].places] == [2, 6]

    @pytest.mark.slow
    def test_a_long_line_takes_no_memory(self, tmp_path: Path) -> None:
        """A sparse file of 256 MB with one line is skipped in pieces."""
        file = tmp_path / "f"
        file.write_bytes(LINES[0])
        os.truncate(file, 2**28)
        tracemalloc.start()

        scanned = scan_file(file, longest=2**20)

        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert scanned.count("too_long") == 1
        assert scanned.read == 2**28
        assert peak < 2**25

    def test_a_long_document_is_skipped(self, tmp_path: Path) -> None:
        """An indented document above the limit is told, not read line by line."""
        file = tmp_path / "f"
        file.write_text(json.dumps([{"messages": "x" * 100}] * 90, indent=1))

        scanned = scan_file(file, longest=2_000)

        assert scanned.count("too_long") == 1
        assert scanned.count("not_json") == 0

    def test_deeply_nested_values(self, tmp_path: Path) -> None:
        """Nesting does not exhaust the stack."""
        deep = b'{"messages":' + b"[" * 200_000 + b"]" * 200_000 + b"}\n"
        attribute: Any = {"stringValue": "x"}
        for _ in range(200):
            attribute = {"arrayValue": {"values": [attribute]}}
        export = {
            "resourceSpans": [
                {"scopeSpans": [{"spans": [{"attributes": [{"key": "gen_ai.input.messages", "value": attribute}]}]}]}
            ]
        }

        scanned = scan_values(tmp_path, [deep, export, *LINES])

        assert scanned.loops == FOUND

    @pytest.mark.slow
    @pytest.mark.parametrize("name", FORMATS)
    def test_values_of_wrong_types(self, name: str, tmp_path: Path) -> None:
        """Any value of any line may be anything."""
        random = Random(8)
        odd: list[Any] = [None, True, 0, -1.5, 1e300, "", "x", [], {}, [[]], {"a": {}}, 10**30, "\ud800", "9" * 900]

        def spoil(value: Any) -> Any:  # noqa: ANN401  # JSON
            if random.random() < 0.08:
                return random.choice(odd)
            if isinstance(value, dict):
                return {key: spoil(inner) for key, inner in value.items()}
            return [spoil(inner) for inner in value] if isinstance(value, list) else value

        lines = FORMATS[name](SESSION)
        for _ in range(60):
            scan_values(tmp_path, [spoil(line) for line in lines])  # raises nothing

        assert scan_values(tmp_path, lines).loops == FOUND

    @pytest.mark.slow
    @pytest.mark.parametrize("name", FORMATS)
    def test_bytes_anywhere(self, name: str, tmp_path: Path) -> None:
        """Damage of single bytes does no harm to other lines."""
        random = Random(9)
        data = b"".join(json.dumps(line).encode() + b"\n" for line in FORMATS[name](SESSION))
        for _ in range(40):
            damaged = bytearray(data)
            for _ in range(random.randrange(1, 30)):
                damaged[random.randrange(len(damaged))] = random.randrange(256)
            scan_values(tmp_path, [bytes(damaged)])  # raises nothing

        assert scan_values(tmp_path, [data]).loops == FOUND


class TestFiles:
    """Files that are no transcripts."""

    @pytest.mark.parametrize(
        "data", [b"\x7fELF\0\0", b"#!/bin/sh\ntouch owned\n", b"\x89PNG\r\n", b"\0" * 99, b"a,b\n1,2\n", b"  \n\n"]
    )
    def test_other_kinds_of_files(self, data: bytes, tmp_path: Path) -> None:
        """They are recognized by their first bytes, and left alone."""
        scanned = scan_values(tmp_path, [data])

        assert scanned.runs == []
        assert set(scanned.problems) <= {"foreign"}

    def test_json_of_other_kinds_is_named(self, tmp_path: Path) -> None:
        """A file of another program is told with the keys it has."""
        scanned = scan_values(tmp_path, [{"name": "x", "version": 1}])

        assert scanned.problems["unknown"].names == {"an object with name, version": 1}

    def test_compressed_files(self, tmp_path: Path) -> None:
        """What gzip has packed is read; where it is damaged, what stands before is."""
        file = tmp_path / "f.gz"
        file.write_bytes(gzip.compress(b"".join(LINES)))
        assert scan_file(file).loops == FOUND

        file.write_bytes(file.read_bytes()[:-30])
        scanned = scan_file(file)
        assert scanned.count("damaged") == 1

    @pytest.mark.slow
    def test_a_bomb_is_bounded(self, tmp_path: Path) -> None:
        """A small file with a long line in it is read in pieces."""
        file = tmp_path / "f.gz"
        file.write_bytes(gzip.compress(b"{" + b" " * 2**26))
        tracemalloc.start()

        scanned = scan_file(file, longest=2**16)

        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert scanned.count("too_long") == 1
        assert peak < 2**24

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        """They are counted with the reason."""
        scanned = scan_file(tmp_path / "gone")

        assert scanned.problems["unreadable"].names == {"No such file or directory": 1}

    def test_links_in_circles(self, tmp_path: Path) -> None:
        """Each file is found once, whatever links lead to it, and pipes and sockets are not opened."""
        write_lines(tmp_path / "a" / "one.jsonl", write_claude_code(SESSION))
        (tmp_path / "a" / "circle").symlink_to(tmp_path)
        (tmp_path / "a" / "again.jsonl").symlink_to(tmp_path / "a" / "one.jsonl")
        (tmp_path / "self").symlink_to(tmp_path / "self")
        (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
        os.mkfifo(tmp_path / "pipe")
        with socket.socket(socket.AF_UNIX) as listener:
            os.chdir(tmp_path)  # the path of a socket is short
            listener.bind("socket")
            unread = UnreadLines()

            found = find_files([str(tmp_path), str(tmp_path / "a")], unread)

        assert len(found) == 1
        assert unread.by_kind["unreadable"].count == 2

    def test_files_that_were_not_changed_since(self, tmp_path: Path) -> None:
        """Old files are not opened."""
        file = write_lines(tmp_path / "one.jsonl", write_claude_code(SESSION))
        os.utime(file, (1_000, 1_000))

        assert find_files([str(tmp_path)], UnreadLines(), since=2_000) == []
        assert len(find_files([str(tmp_path)], UnreadLines(), since=500)) == 1

    def test_paths_that_do_not_exist(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The message says what would be right; without a path, the usual places are read."""
        with pytest.raises(UsageError, match="gone does not exist: name a file or a folder"):
            choose_paths([str(tmp_path / "gone")])
        monkeypatch.setenv("HOME", str(tmp_path))
        with pytest.raises(UsageError, match=r"no transcripts in ~/\.claude/projects or ~/\.codex/sessions"):
            choose_paths([])

        (tmp_path / ".codex" / "sessions").mkdir(parents=True)

        assert choose_paths([]) == [str(tmp_path / ".codex" / "sessions")]
