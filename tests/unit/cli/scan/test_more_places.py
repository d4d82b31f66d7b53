"""Transcripts that are packed, archived, elsewhere, behind links, or that only some programs can read."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.main import main
from extproc.cli.packed import open_packed
from extproc.cli.scan.files import choose_paths, find_files
from extproc.cli.scan.lines import UnreadLines
from tests.support.scanning import scan_file, scan_values
from tests.support.transcripts import (
    AgentSession,
    write_claude_code,
    write_codex,
    write_gemini_cli,
    write_lines,
    write_requests,
)
from tests.support.turn_writers import Did

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

FAILING = Did((("check", {"part": 1}),), ("Error: part 1 is broken. " + "It is. " * 30,))
SESSION = AgentSession([FAILING] * 8)
FOUND = [("repeat", 1, 4, 8, 8)]


LOOPING = {"enabled": True, "window_seconds": 60, "threshold_identical_requests": 9}


def pack(values: list[Any], level: int = 3) -> bytes:
    """Lines, as Codex packs them."""
    return zstd.compress(b"".join([json.dumps(value).encode() + b"\n" for value in values]), level)


def test_a_rollout_packed_with_zstd_is_read(tmp_path: Path) -> None:
    """In one frame or several; where it is damaged or cut off, that is told."""
    file = tmp_path / "rollout.jsonl.zst"
    lines = write_codex(SESSION)
    whole = pack(lines, 19)
    file.write_bytes(whole)
    assert (scan_file(file).loops, scan_file(file).read) == (FOUND, len(whole))

    file.write_bytes(pack(lines[:5]) + pack(lines[5:]))
    assert scan_file(file).loops == FOUND

    for damaged in (whole[:-9], whole[:40] + b"\0" * 60 + whole[100:]):
        file.write_bytes(damaged)
        assert scan_file(file).count("damaged") == 1


def test_a_packed_document_is_read_from_its_start(tmp_path: Path) -> None:
    """Its first line alone is no JSON, so it is read again as a whole; damaged ones are read as lines."""
    file = tmp_path / "session.json.zst"
    head, *messages = write_gemini_cli(SESSION)
    whole = json.dumps({**head, "messages": [line for line in messages if "$set" not in line]}, indent=1).encode()
    file.write_bytes(zstd.compress(whole))
    assert scan_file(file).loops == FOUND

    lines = b'{"broken\n' + b"".join([json.dumps(line).encode() + b"\n" for line in write_codex(SESSION)])
    file.write_bytes(zstd.compress(lines))
    assert scan_file(file).loops == FOUND


@pytest.mark.parametrize("data", [b"{}\n" * 2**20, b'{"a":"' + b"x" * 2**22], ids=["lines", "one line"])
def test_a_bomb_of_zstd_is_not_read_to_its_end(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may become as large as gzip could make it, and no larger."""
    monkeypatch.setattr("extproc.cli.packed._FREE", 2**16)
    file = tmp_path / "bomb.zst"
    file.write_bytes(zstd.compress(data, 19))
    read = [0]

    class Counted(zstd.ZstdFile):
        def readline(self, size: int | None = -1, /) -> bytes:
            line = super().readline(-1 if size is None else size)
            read[0] += len(line)
            return line

    monkeypatch.setattr("extproc.cli.packed.zstd.ZstdFile", Counted)

    scanned = scan_file(file, longest=2**18)

    assert scanned.count("bomb") == 1
    assert read[0] < len(data)


def test_windows_above_those_of_the_zstd_command_are_refused(tmp_path: Path) -> None:
    """A header of a few bytes must not make the reader take gigabytes."""
    file = tmp_path / "f.zst"
    magic, no_checksum, window_of_2_gib = b"\x28\xb5\x2f\xfd", b"\x00", b"\xa8"
    file.write_bytes(magic + no_checksum + window_of_2_gib + b"\x01\x00\x00")

    assert scan_file(file).count("damaged") == 1


def test_replay_reads_logs_packed_with_zstd(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As those of gzip; damaged ones are told."""
    bundle, log = tmp_path / "p.json", tmp_path / "log.zst"
    bundle.write_text(
        json.dumps(
            {"id": "p", "spec": {"selector": {"pathPrefix": "/"}, "limit_keys": ["header:x-a"], "loop_detection": LOOPING}}
        )
    )
    record = {"record": 1, "time": 1e9, "method": "POST", "path": "/", "headers": {"x-a": "1"}, "body": {}}
    log.write_bytes(pack([record] * 3))
    assert main(["replay", "--policy", str(bundle), "--strict", str(log)]) == 0
    assert "3 requests in 3 lines" in capsys.readouterr().out

    log.write_bytes(log.read_bytes()[:-5])
    assert main(["replay", "--policy", str(bundle), "--strict", str(log)]) == 1
    assert "cut off" in capsys.readouterr().err


def test_files_are_known_by_their_first_bytes(tmp_path: Path) -> None:
    """Whatever their names say."""
    file = tmp_path / "f"
    kinds = []
    for data in (b"{}", gzip.compress(b"{}"), zstd.compress(b"{}"), b"\x28\xb5", b""):
        file.write_bytes(data)
        with file.open("rb") as raw:
            kinds.append(type(open_packed(raw)).__name__)

    assert kinds == ["BufferedReader", "GzipFile", "ZstdFile", "BufferedReader", "BufferedReader"]


def test_archived_rollouts_are_in_the_usual_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so are the sessions of Gemini CLI."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "GEMINI_CLI_HOME"):
        monkeypatch.delenv(name, raising=False)
    places = [".claude/projects", ".codex/sessions", ".codex/archived_sessions", ".gemini/tmp"]
    for place in places:
        (tmp_path / place).mkdir(parents=True)

    assert choose_paths([]) == [str(tmp_path / place) for place in places]


def test_variables_name_the_folders_of_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the agents themselves read them; an empty one is none."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, home in (("CLAUDE_CONFIG_DIR", "c"), ("CODEX_HOME", "x/"), ("GEMINI_CLI_HOME", "")):
        monkeypatch.setenv(name, home and str(tmp_path / home) + "/" * home.endswith("/"))
    for place in ("c/projects", "x/archived_sessions", ".claude/projects", ".codex/sessions", ".gemini/tmp"):
        (tmp_path / place).mkdir(parents=True)

    assert choose_paths([]) == [str(tmp_path / place) for place in ("c/projects", "x/archived_sessions", ".gemini/tmp")]


HALVES = {"high": "\ud83d", "low": "\ude00", "two": "\ud83d\ud83d"}


@pytest.mark.parametrize("half", ["high", "low", "two"])
@pytest.mark.parametrize("where", ["lines", "document", "text", "otlp"])
def test_halves_of_surrogate_pairs_do_not_hide_a_loop(where: str, half: str, tmp_path: Path) -> None:
    """JavaScript cuts texts in the middle of an emoji; the gateway reads such bodies, and so does the scan."""
    turns = [Did((("check", {"part": 1}),), (f"Error: part 1 is broken {HALVES[half]}. " + "It is. " * 30,))] * 8
    session = AgentSession(turns)
    if where == "otlp":
        from tests.support.transcripts import write_otlp  # one of several formats

        scanned = scan_values(tmp_path, write_otlp(session))
    elif where == "text":
        requests = [{**line, "request": json.dumps(line["request"])} for line in write_requests(session, "chat")]
        scanned = scan_values(tmp_path, requests)
    elif where == "document":
        file = tmp_path / "f.json"
        file.write_text(json.dumps(write_claude_code(session), indent=1))
        scanned = scan_file(file)
    else:
        scanned = scan_values(tmp_path, write_claude_code(session))

    assert scanned.count("not_json") == 0
    assert [loop[0] for loop in scanned.loops] == ["repeat"]


def test_links_are_not_followed_out_of_the_folder(tmp_path: Path) -> None:
    """To files and to folders; those that stay within it are, and so is the given path itself."""
    inside, outside = tmp_path / "in", tmp_path / "in-other"
    write_lines(outside / "secret.jsonl", write_claude_code(SESSION))
    write_lines(inside / "deep" / "own.jsonl", write_claude_code(SESSION))
    (inside / "file.jsonl").symlink_to(outside / "secret.jsonl")
    (inside / "folder").symlink_to(outside)
    (inside / "relative").symlink_to("../in-other/secret.jsonl")
    (inside / "deep" / "twice").symlink_to("../folder/secret.jsonl")
    (inside / "within").symlink_to(inside / "deep")
    (tmp_path / "given").symlink_to(inside)
    unread = UnreadLines()

    for path in (inside, tmp_path / "given"):
        assert [Path(file.path).name for file in find_files([str(path)], unread)] == ["own.jsonl"]
    assert unread.by_kind["link"].count == 8
    assert [Path(file.path).name for file in find_files([str(inside / "file.jsonl")], unread)] == ["file.jsonl"]


class TestGeminiCli:
    """Sessions of Gemini CLI; `test_formats` has what all formats have in common."""

    def test_a_document_is_read_as_its_lines_are(self, tmp_path: Path) -> None:
        """Older versions write one, indented; a call with the same id counts once."""
        head, *messages = write_gemini_cli(SESSION)
        last = {message["id"]: message for message in messages if "$set" not in message}
        document, lines = tmp_path / "session-a.json", tmp_path / "session-a.jsonl"
        document.write_text(json.dumps({**head, "messages": list(last.values())}, indent=2))
        write_lines(lines, [head, *messages])

        one, other = [scan_file(file) for file in (document, lines)]

        assert one.loops == other.loops == FOUND
        assert [run.spent[:2] for run in (*one.runs, *other.runs)] == [(8, SESSION.add_tokens(1, 8))] * 2
        assert [run.calls[::4] for run in one.runs] == [run.calls[::4] for run in other.runs]
        assert main(["scan", str(tmp_path)]) == 0

    def test_whose_session_it_is(self, tmp_path: Path) -> None:
        """Folders tell the project, and which session started a sub-agent."""
        lines = write_gemini_cli(SESSION)
        chats = tmp_path / "shop" / "chats"
        main_file = write_lines(chats / "session-1.jsonl", lines)
        agent = write_lines(
            chats / "s1" / "agent-7.jsonl", [{**lines[0], "sessionId": "agent-7", "kind": "subagent"}, *lines[1:]]
        )

        abouts = [scan_file(file).runs[0].about for file in (main_file, agent)]

        assert [(about.session, about.root, about.agent) for about in abouts] == [
            ("s1", "s1", "gemini-cli"),
            ("agent-7", "s1", "gemini-cli sub-agent"),
        ]
        assert {about.project for about in abouts} == {str(tmp_path / "shop")}

    @pytest.mark.parametrize(
        "result",
        [
            "cat: x: No such file or directory, and nothing like it is anywhere near",
            [{"text": "cat: x: No such file or directory, and nothing like it is anywhere near"}],
            None,
        ],
    )
    def test_results_of_other_forms_are_results(self, result: object, tmp_path: Path) -> None:
        """A text, parts without a response, or only what was shown."""
        lines = write_gemini_cli(SESSION)
        for line in lines:
            for call in line.get("toolCalls", ()):
                call |= {"result": result, "resultDisplay": "cat: x: No such file or directory", "status": "error"}

        assert [loop[:3] for loop in scan_values(tmp_path, lines).loops] == [("repeat", 1, 4)]

    def test_a_rewound_session_begins_anew(self, tmp_path: Path) -> None:
        """Turns before it are not in the history any more."""
        lines = write_gemini_cli(AgentSession([FAILING] * 4))
        again = write_gemini_cli(AgentSession([FAILING] * 4, name="s2"))[2:]
        rewound = [*lines, {"$rewindTo": "u0"}, *again]

        scanned = scan_values(tmp_path, rewound)

        assert [run.spent.calls for run in scanned.runs] == [8]
        assert [loop[3] for loop in scanned.loops] == [0, 0]  # eight in a row would be stopped

    def test_messages_of_a_new_kind_are_named(self, tmp_path: Path) -> None:
        """And those that are no turns are passed over."""
        head, *messages = write_gemini_cli(SESSION)
        more = [
            {"id": "i", "type": "info", "content": "x"},
            {"id": "n", "type": "novelty"},
            {"id": "b", "type": "gemini", "toolCalls": 5},
        ]

        scanned = scan_values(tmp_path, [head, *more, *messages])

        assert scanned.loops == FOUND
        assert scanned.problems["unknown_kind"].names == {"Gemini CLI: novelty": 1}
        assert scanned.count("unread") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_cannot_be_listed_is_told(tmp_path: Path) -> None:
    """With its name."""
    (tmp_path / "closed").mkdir(mode=0)
    unread = UnreadLines()

    assert find_files([str(tmp_path)], unread) == []
    assert unread.by_kind["unreadable"].count == 1
