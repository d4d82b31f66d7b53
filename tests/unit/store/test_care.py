"""What a store on servers keeps when it restarts, and that it has lost its keys."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, cast

import pytest

from extproc.errors import StoreError
from extproc.metrics import Metrics
from extproc.operator.admin.coverage_report import ServerState, make_report
from extproc.operator.board import View
from extproc.operator.coverage_rows import CoverageDocument
from extproc.store.care import (
    EMPTIED,
    LOG,
    NOTHING,
    SNAPSHOTS,
    UNKNOWN,
    StoreCare,
    classify_persistence,
    read_setting,
)
from extproc.store.memory import MemoryStore
from extproc.store.side_connections import SideConnections

AOF = "# Persistence\r\nloading:0\r\naof_enabled:1\r\naof_last_write_status:ok\r\n"
NO_AOF = "# Persistence\r\naof_enabled:0\r\nrdb_last_bgsave_status:ok\r\n"


class Servers:
    """As much of a store as is asked here: each server keeps the mark that it is given first."""

    def __init__(self, *kept: str) -> None:
        self.kept = list(kept)
        self.marks: list[dict[str, bytes]] = [{} for _ in kept]
        self.error: StoreError | None = None

    async def share_marks(self, mark: bytes) -> dict[str, bytes]:
        if self.error is not None:
            raise self.error
        return {
            str(place): marks.setdefault("mark", mark) for place, marks in enumerate(self.marks)
        }

    async def read_persistence(self) -> list[str]:
        return self.kept


def look(care: StoreCare, times: int = 1) -> None:
    for _ in range(times):
        asyncio.run(care.look())


def attend(store: object) -> tuple[StoreCare, list[Any]]:
    care, told = StoreCare(store, Metrics()), list[Any]()
    care.emit = told.append
    return care, told


def test_emptied_server_is_reported_once_per_replica(caplog: pytest.LogCaptureFixture) -> None:
    """By every replica that knew its mark; one that begins later takes the new mark."""
    servers = Servers(LOG, LOG)
    (one, told), (other, told_too) = attend(servers), attend(servers)
    look(one, 3)
    look(other)
    assert (told, one.emptied, one.since > 0) == ([], 0, True)

    servers.marks[1].clear()
    look(one, 2)
    look(other, 2)
    late, _ = attend(servers)
    look(late)

    assert told == told_too == [{"servers": 1, "of": 2, "kept_since": one.since}]
    assert (one.emptied > 0, other.emptied > 0, late.emptied) == (True, True, 0)
    assert [(record.message, record.levelno) for record in caplog.records] == [
        (EMPTIED, logging.ERROR)
    ] * 2


def test_unavailable_store_is_not_emptied() -> None:
    servers, down = Servers(LOG), StoreError("down", kind="connection")
    care, told = attend(servers)

    for error in (down, None, down, None):
        servers.error = error
        look(care)

    assert (told, care.emptied) == ([], 0)


def test_memory_store_is_not_checked() -> None:
    care, told = attend(MemoryStore(Metrics()))
    look(care)

    assert (care.persistence, care.emptied, told) == ("", 0, [])


@pytest.mark.parametrize(
    ("kept", "least"),
    [
        ((LOG, LOG), LOG),
        ((LOG, SNAPSHOTS), SNAPSHOTS),
        ((UNKNOWN, SNAPSHOTS), UNKNOWN),
        ((LOG, NOTHING), NOTHING),
    ],
)
def test_least_persistent_server_counts(kept: tuple[str, ...], least: str) -> None:
    care, _ = attend(Servers(*kept))
    look(care)

    assert care.persistence == least


@pytest.mark.parametrize(
    ("info", "points", "expected"),
    [
        (AOF, "", LOG),
        (AOF, None, LOG),
        (AOF.replace("status:ok", "status:err"), "", NOTHING),
        (NO_AOF, "", NOTHING),
        (NO_AOF, "3600 1 300 100", SNAPSHOTS),
        (NO_AOF.replace("status:ok", "status:err"), "3600 1", NOTHING),
        (NO_AOF, None, UNKNOWN),
        ("", "", UNKNOWN),
        ("# Persistence\r\nnonsense", "3600 1", UNKNOWN),
    ],
)
def test_persistence_is_read_from_server_info(info: str, points: str | None, expected: str) -> None:
    assert classify_persistence(info, points) == expected


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ([b"save", b"3600 1"], "3600 1"),
        ([b"save", b""], ""),
        ([], None),
        (None, None),
        (b"OK", None),
    ],
)
def test_setting_is_read_from_a_reply(reply: object, expected: str | None) -> None:
    assert read_setting(reply) == expected


class Layout:
    def __init__(self, *owners: str) -> None:
        self.owners: Sequence[str] = owners
        self.tags: Sequence[str] = ()
        self.changes = 0

    def open(self, owner: str) -> Any:  # noqa: ANN401  # no connection is opened
        raise AssertionError(owner)


@pytest.mark.parametrize(
    "owners", [("a",), ("a", "a", "b", "b"), ("a", "b", "c", "a"), tuple("abcdefgh")]
)
def test_every_server_has_a_mark(owners: tuple[str, ...]) -> None:
    connections = SideConnections(cast("Any", Layout(*owners)), "loopguard:")

    found = [owners[connections.find_part(name)] for name in connections.list_subjects("epoch")]
    assert sorted(found) == sorted(set(owners))


NOW = 1_000_000.0


def report(reason: str, **known: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:  # noqa: ANN401  # fields of ServerState
    state = ServerState(
        "shared",
        "ok",
        watching=False,
        limits_sessions=False,
        acting=1,
        refused=[],
        unenforced=0,
        **known,
    )
    made = make_report(View(CoverageDocument([], 0.0, 60.0), "r", ["r"], ""), state, {}, NOW)
    return made, [each for each in made["findings"] if each["reason"] == reason]


@pytest.mark.parametrize(
    ("persistence", "must_keep", "level"),
    [
        (NOTHING, True, "problem"),
        (SNAPSHOTS, True, "note"),
        (UNKNOWN, True, "note"),
        (LOG, True, None),
        ("", True, None),
        (NOTHING, False, None),
    ],
)
def test_doctor_says_what_a_restart_would_lose(
    persistence: str, must_keep: bool, level: str | None
) -> None:  # a case
    _, found = report("store_persistence", persistence=persistence, must_keep=must_keep)

    assert [each["level"] for each in found] == ([level] if level else [])
    assert all("budgets would be full again" in each["text"] for each in found)


@pytest.mark.parametrize(("emptied", "expected"), [(NOW - 60, 1), (NOW - 90_000, 0), (0.0, 0)])
def test_doctor_reports_an_emptied_store_for_a_day(emptied: float, expected: int) -> None:
    made, found = report("store_emptied", emptied=emptied, kept_since=NOW - 3_600)

    assert len(found) == expected
    assert (made["store_emptied"] is not None) == bool(emptied)
    assert made["store_kept_since"] == "1970-01-12T12:46:40Z"
