"""Two teams on one Loopguard behind the real Envoy, one of them hostile: neither changes, delays or reads the other's."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import bundle, policy
from tests.support.harness import Stack, eventually, stack


def guard(identity: str, prefix: str, threshold: int) -> dict[str, Any]:
    """A team's policy."""
    return policy(identity, {"pathPrefix": prefix}, limit_keys=["header:x-user"], threshold_identical_requests=threshold)


class Teams:
    """Team A's policies on `/a`, and team B's, which are confined to `/b`."""

    def __init__(self, made: Stack, folder: Path) -> None:
        self.made = made
        self.file = folder / "b.json"

    def write_b(self, document: object) -> None:
        """Replace B's file, in one step."""
        fresh = self.file.with_suffix(".tmp")
        fresh.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
        fresh.replace(self.file)

    def ask(self, path: str, times: int, user: str) -> list[int]:
        """The statuses of this many identical requests."""
        return self.made.repeat(path, times, headers={"x-user": user})

    def wait_for(self, identity: str) -> None:
        """Wait until a policy acts."""
        eventually(lambda: identity in self.made.loopguard.ask("/policies")["modes"], "the change")


@pytest.fixture
def teams(tmp_path: Path) -> Iterator[Teams]:
    """Both teams, with good policies."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "b.json").write_text(json.dumps(guard("b-1", "/b", 4)))
    # Envoy asks about both paths.
    both = bundle(guard("a-1", "/a", 3), policy("watch", {"pathPrefix": "/"}, mode="shadow", threshold_identical_requests=9))
    flags = ("--policy", f"{tmp_path}/b", "--namespace-of", f"{tmp_path}/b=path:/b,id:b-")
    with stack(both, *flags) as made:
        yield Teams(made, tmp_path / "b")


HOSTILE = [
    guard("b-1", "/", 2),
    guard("a-1", "/b", 2),
    bundle(guard("b-1", "/b", 2), kill_switches=[{"scope_key": "header:x-user", "scope_value": "ann"}]),
    [guard("b-1", "/b", 2), {**guard("b-2", "/b", 2), "spec": {"selector": {"routes": ["any"]}}}],
    b"[" * 100_000,
]


def test_a_hostile_team_changes_nothing_of_the_others(teams: Teams) -> None:
    """Each attempt is refused as a whole, is told with its file, and both teams' last good policies act."""
    for number, document in enumerate(HOSTILE):
        teams.write_b(document)
        metric = teams.made.loopguard.metric
        eventually(lambda: metric("policy_reloads_total", result="error") > number, "the refusal")  # noqa: B023
        user = f"ann-{number}" if number != 2 else "ann"
        assert (teams.ask("/a/x", 3, user), teams.ask("/b/x", 4, user)) == ([200, 200, 429], [200, 200, 200, 429])
        told = teams.made.loopguard.ask("/policies")
        assert [(each["file"], each["in_force"]) for each in told["refused"]["files"]] == [(str(teams.file), True)]
        assert told["modes"].keys() == {"a-1", "watch", "b-1"}
        ready = teams.made.loopguard.ask("/readyz")
        assert (ready["status"], ready["store"], ready["refused"]) == ("ready", "ok", [str(teams.file)])
        assert metric("policy_file_refused", file=str(teams.file)) == 1


def test_a_hostile_team_delays_no_change_of_the_others(teams: Teams) -> None:
    """While one team writes bad files of a megabyte without pause, the other's changes act, and so do its policies."""
    stop = threading.Event()

    def flood() -> None:
        number = 0
        while not stop.wait(0.05):
            number += 1
            teams.write_b([guard(f"b-{each}", "/", 2 + number % 7) for each in range(2_000)])

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        for threshold in (2, 4, 5):
            teams.made.write_policies(bundle(guard(f"a-{threshold}", "/a", threshold), bundle_version=threshold))
            teams.wait_for(f"a-{threshold}")
            assert teams.ask("/a/x", threshold, f"bob-{threshold}") == [*([200] * (threshold - 1)), 429]
    finally:
        stop.set()
        thread.join()
