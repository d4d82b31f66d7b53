"""Policies change while the server runs; an invalid change keeps the last good ones."""

import asyncio
import gc
import json
import logging
import shutil
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from extproc import reload
from extproc.engine.engine import Engine
from extproc.engine.plan import Plan
from extproc.errors import BundleError, BundleErrors
from extproc.metrics import Metrics
from extproc.objects import JsonObject
from extproc.policy import last_good
from extproc.policy.files import read_each
from extproc.policy.loader import ParsedFile, parse_file
from extproc.reload import Reloader
from extproc.settings import Settings
from tests.support.bundles import RULE
from tests.support.documents import bundle, policy
from tests.support.harness import PATIENCE

pytestmark = pytest.mark.compiled  # what is made of policies is compiled

NOW = datetime(2026, 6, 1, tzinfo=UTC)
SOON = (NOW + timedelta(seconds=1)).isoformat()


# Any field of loop_detection
def guard(identity: str = "p", **more: Any) -> dict[str, Any]:  # noqa: ANN401
    return policy(identity, {"pathPrefix": "/"}, limit_keys=["jwt:org"], **more)


NOTED = {**guard("p"), "x-owner": "team a"}
FILES: list[object] = [bundle(NOTED, global_shadow={"enabled": True}), NOTED, [NOTED]]


class Place:
    """A policy directory, its Reloader, and a clock that stands still."""

    def __init__(
        self, folder: Path, runner: asyncio.Runner, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nothing is loaded until `start`."""
        self.folder, self.runner, self.caplog = folder, runner, caplog
        self.now = NOW
        self.metrics = Metrics()
        self.swapped: list[Engine] = []

    def write(self, **files: object) -> None:
        """Write files by their names without `.json`: bytes unchanged; None removes one."""
        for name, document in files.items():
            file = self.folder / f"{name}.json"
            if document is None:
                file.unlink()
            else:
                file.write_bytes(
                    document if isinstance(document, bytes) else json.dumps(document).encode()
                )

    def start(self, *paths: Path, **settings: Any) -> None:  # noqa: ANN401  # any setting
        """Load for the first time."""
        names = tuple(map(str, paths or (self.folder,)))
        self.reloader = Reloader(Settings(policy=names, **settings), self.metrics, lambda: self.now)

    def change(self, **files: object) -> list[str]:
        """Write files, reload, and return the active policies."""
        self.write(**files)
        self.runner.run(self.reloader.reload(self.swapped.append))
        return self.ids

    def force(self) -> list[str]:
        """Reload as SIGHUP does, and return the active policies."""
        self.runner.run(self.reloader.reload(self.swapped.append, force=True))
        return self.ids

    def settle(self) -> list[str]:
        """Wait for files that are parsed in the background, and return the active policies."""
        self.runner.run(self.reloader.settle())
        return self.ids

    def read(self, metric: str, **labels: str) -> float | None:
        """A sample of a metric."""
        return self.metrics.registry.get_sample_value(f"loopguard_{metric}", labels)

    @property
    def reloads(self) -> tuple[float, float]:
        """The number of reloads, and of those that failed."""
        ok, error = (
            self.read("policy_reloads_total", result=result) or 0 for result in ("ok", "error")
        )
        return ok, error

    @property
    def ids(self) -> list[str]:
        """The active policies; the engine that was swapped in last is the Reloader's own."""
        assert self.swapped[-1:] in ([], [self.reloader.engine])
        return [plan.id for plan in self.reloader.engine.plans]

    @property
    def modes(self) -> list[str]:
        """Their modes."""
        return [plan.mode for plan in self.reloader.engine.plans]

    @property
    def refused(self) -> dict[str, tuple[str, ...]]:
        """The errors of each refused file, by its name; the metrics say the same."""
        found = {
            Path(file).stem: tuple(refusal.errors)
            for file, refusal in self.reloader.refusals.items()
        }
        (family,) = (
            each
            for each in self.metrics.registry.collect()
            if each.name == "loopguard_policy_file_refused"
        )
        assert {Path(sample.labels["file"]).stem for sample in family.samples} == {*found}
        assert self.read("policy_reload_refused") == bool(found)
        refusal = self.reloader.refusal
        assert (refusal.count if refusal else 0) == sum(map(len, found.values()))
        return found

    def take_errors(self) -> list[str]:
        """The messages logged as errors since the last call."""
        found = [
            record.getMessage() for record in self.caplog.records if record.levelno == logging.ERROR
        ]
        self.caplog.clear()
        return found

    async def until(self, *ids: str) -> None:
        """Wait until these policies are active."""
        async with asyncio.timeout(PATIENCE):
            while self.ids != list(ids):  # noqa: ASYNC110  # polling is what a bystander can do
                await asyncio.sleep(0.01)


@pytest.fixture
def place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Place]:
    caplog.set_level(logging.INFO)
    (tmp_path / "policies").mkdir()
    with asyncio.Runner() as runner:
        yield Place(tmp_path / "policies", runner, caplog)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.json").write_text(json.dumps(guard("b")))
    return tmp_path / "other"


EXPLODES = guard("b", action="explode")
# Changed files, active policies afterwards, refused files
Step = tuple[Mapping[str, object], str, str]
SCENARIOS: dict[
    str, tuple[dict[str, object], list[Step], tuple[int, int]]
] = {  # files, steps, reloads and failures
    "changed, new and removed files": (
        {"p": guard("a")},
        [
            ({"p": guard("b")}, "b", ""),
            ({"q": [guard("c"), guard("d")]}, "b c d", ""),
            ({"p": None}, "c d", ""),
        ],
        (3, 0),
    ),
    "the same bytes": ({"p": guard()}, [({"p": guard()}, "p", "")], (0, 0)),
    "every bad change counts, and so does going back": (
        {"p": guard()},
        [
            ({"p": b"{"}, "p", "p"),
            ({}, "p", "p"),
            ({"p": b"{ "}, "p", "p"),
            ({"p": guard()}, "p", ""),
        ],
        (1, 2),
    ),
    "files that are gone": (
        {"p": guard("a")},
        [
            ({"p": None}, "a", "policies"),
            ({}, "a", "policies"),
            ({"p": guard("a")}, "a", ""),
            ({"p": None}, "a", "policies"),
        ],
        (0, 2),
    ),
    "a bad file keeps no other out": (
        {"a": guard("a-1"), "b": guard("b-1")},
        [
            ({"a": guard("a-2"), "b": b"{"}, "a-2 b-1", "b"),
            ({"a": guard("a-3")}, "a-3 b-1", "b"),
            ({"b": guard("b-2")}, "a-3 b-2", ""),
        ],
        (3, 1),
    ),
    "a new bad file is left out": (
        {"a": guard("a")},
        [({"a": guard("a-2"), "b": EXPLODES}, "a-2", "b"), ({"b": None}, "a-2", "")],
        (2, 1),
    ),
    "an id stays with its file, behind the thief": (
        {"0": guard("b"), "m": guard("a")},
        [
            ({"0": [guard("b-2"), guard("a")], "m": [guard("a"), guard("a-2")]}, "b a a-2", "0"),
            ({"m": guard("a-2")}, "b-2 a a-2", ""),
        ],
        (2, 1),
    ),
    "an id stays with its file, before the thief": (
        {"m": guard("a"), "z": guard("b")},
        [
            ({"m": [guard("a"), guard("a-2")], "z": [guard("b-2"), guard("a")]}, "a a-2 b", "z"),
            ({"m": guard("a-2")}, "a-2 b-2 a", ""),
        ],
        (2, 1),
    ),
    "files that contradict each other return to what was good": (
        {"a": guard("x"), "b": guard("y")},
        [({"a": b"{", "b": guard("x")}, "x y", "a b")],
        (0, 2),
    ),
}


@pytest.mark.parametrize(("files", "steps", "reloads"), SCENARIOS.values(), ids=SCENARIOS)
def test_valid_changes_apply_and_invalid_files_keep_theirs(
    place: Place, files: Mapping[str, object], steps: list[Step], reloads: tuple[int, int]
) -> None:
    place.write(**files)
    place.start()

    for changes, ids, refused in steps:
        assert place.change(**changes) == ids.split(), changes
        assert [*place.refused] == refused.split(), changes

    assert (place.reloads, len(place.swapped)) == (reloads, reloads[0])


def test_loaded_policies_are_frozen_for_the_garbage_collector(place: Place) -> None:
    place.write(p=guard("a"))
    place.start()
    place.change(p=guard("b"))
    left = {id(thing) for thing in gc.get_objects()}  # all that a collection would walk
    on = [gc.isenabled()]
    place.change(p=b"{")

    assert not {id(plan) for plan in place.reloader.engine.plans} & left
    assert [*on, gc.isenabled()] == [True, True]


def count_models() -> int:
    """The number of validated documents that are still in memory."""
    gc.unfreeze()
    # Pydantic's isinstance takes a second
    return sum(JsonObject in type(thing).__mro__ for thing in gc.get_objects())


@pytest.mark.deep
@pytest.mark.parametrize("file", FILES, ids=["bundle", "policy", "list"])
def test_validated_documents_and_old_plans_are_freed(place: Place, file: object) -> None:
    before = count_models()
    place.write(p=file)
    place.start()
    started = count_models()
    old = {id(plan) for plan in place.reloader.engine.plans}
    place.write(p=[guard("q")])
    place.runner.run(place.reloader.reload(lambda _: None))
    replaced = count_models()
    place.write(p=[guard("q"), EXPLODES])
    place.runner.run(place.reloader.reload(lambda _: None))

    assert (started, replaced, count_models()) == (before, before, before)
    assert (place.ids, [*place.refused]) == (["q"], ["p"])
    assert not [thing for thing in gc.get_objects() if isinstance(thing, Plan) and id(thing) in old]


@pytest.mark.parametrize("file", FILES, ids=["bundle", "policy", "list"])
def test_active_policies_are_listed_as_written(place: Place, file: object) -> None:
    place.write(p=file)
    place.start()
    place.change(p=b"{")

    assert place.reloader.list_policies() == [(place.reloader.sources[0], [NOTED])]


KEPT = "policies not reloaded, the last good ones stay in force"
NEW = "policies not loaded: no version of the file has been in force"
NO_COUNTRY = (
    "the descriptor ip:country cannot be derived by Loopguard, so the rule r never applies; "
    "use ip:address or a header that your proxy sets, such as header:x-country"
)


@pytest.mark.parametrize(
    ("document", "told"),
    [
        (
            bundle(guard("q", action="explode"), bundle_version=0),
            [
                "/bundle_version: bundle_version must be greater than 0, not 0",
                (
                    "/policies/0/spec/loop_detection/action: "
                    "action must be one of reject, land, throttle, steer, warn, not 'explode'"
                ),
            ],
        ),
        (
            {
                "id": "q",
                "spec": {**guard("q")["spec"], "rules": [RULE | {"limit_keys": ["ip:country"]}]},
            },
            [
                (
                    f"/spec/rules/0/limit_keys/0: {NO_COUNTRY}; remove it, or start with "
                    "--allow-unenforced"
                )
            ],
        ),
    ],
    ids=["errors", "unenforced parts"],
)
def test_errors_of_an_invalid_change_are_logged_once(
    place: Place, document: object, told: list[str]
) -> None:
    place.write(p=guard(), notes=[])
    (place.folder / "loopguard.log").write_text("some lines\n")
    place.start()
    before = place.reloader.engine
    for _ in range(3):
        place.change(p=document)

    assert place.take_errors() == [*(f"{place.folder}/p.json: {each}" for each in told), KEPT]
    assert (place.reloader.engine, place.reloads) == (before, (0, 1))


def test_reload_may_allow_unenforced_parts(place: Place) -> None:
    place.write(p=guard())
    place.start(allow_unenforced=True)

    assert place.change(
        p={
            "id": "q",
            "spec": {**guard("q")["spec"], "rules": [RULE | {"limit_keys": ["ip:country"]}]},
        }
    ) == ["q"]


def test_unexpected_error_is_a_failed_reload(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("unforeseen")

    place.write(p=guard())
    place.start()
    monkeypatch.setattr(reload, "choose", broken)
    place.change(p=guard("q"))
    monkeypatch.undo()

    assert place.change(p=guard("r")) == ["r"]
    assert (place.take_errors(), place.reloads) == (["unforeseen", KEPT], (1, 1))


def test_path_that_never_answers_is_one_failed_reload(
    place: Place, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = threading.Event()
    waiting: list[threading.Thread] = []

    def stuck(paths: Iterable[str]) -> dict[str, bytes | BundleError]:
        if str(other) in [*paths]:
            waiting.append(threading.current_thread())
            assert back.wait(PATIENCE)
        return read_each(paths)

    place.write(a=guard("a"))
    place.start(place.folder, other)
    monkeypatch.setattr(reload, "READ_SECONDS", 0.5)
    monkeypatch.setattr(reload, "read_each", stuck)
    seen = [place.change(a=guard("a-2"))]
    monkeypatch.setattr(reload, "READ_SECONDS", PATIENCE)  # waiting again would take as long
    seen += [place.change(a=guard("a-3")), place.change(a=guard("a-4"))]
    found = [*place.refused], place.take_errors()[:2], [thread.daemon for thread in waiting]
    back.set()
    waiting[0].join(PATIENCE)
    monkeypatch.undo()
    (other / "b.json").write_text(json.dumps(guard("b-2")))

    assert found == (["other"], [f"{other}: /: could not be read within 0.5 s", KEPT], [True])
    assert [*seen, place.change()] == [["a-2", "b"], ["a-3", "b"], ["a-4", "b"], ["a-4", "b-2"]]
    assert place.reloads[0] == 4


def test_reload_logs_which_policies_changed(place: Place) -> None:
    place.write(p=bundle(guard("same"), guard("gone"), guard("other")))
    place.start()
    new = [guard(f"new-{number}") for number in range(12)]
    place.change(p=bundle(guard("same"), guard("other", action="warn"), *new))
    place.force()

    first, second = (
        vars(record)["fields"]
        for record in place.caplog.records
        if record.message == "policies reloaded"
    )
    added = ", ".join(f"new-{number}" for number in range(10))
    assert (first["added"], first["removed"], first["changed"]) == (
        f"{added} and 2 more",
        "gone",
        "other",
    )
    assert not {"added", "removed", "changed"} & second.keys()


def test_policy_named_by_canary_of_can_be_removed(place: Place) -> None:
    candidate = policy("candidate", {"pathPrefix": "/"}, limit_keys=["jwt:org"])
    candidate["spec"] |= {"mode": "shadow", "canary_of": "live"}
    place.write(a=[guard("live"), guard("a")], b=candidate)
    place.start()
    before = [pair.live for pair in place.reloader.engine.pairings]

    assert place.change(a=guard("a")) == ["a", "candidate"]
    assert (before, place.refused) == (["live"], {})
    assert "live" not in [pair.live for pair in place.reloader.engine.pairings]
    assert any("canary_of must name a loaded policy" in line for line in place.caplog.messages)


def test_expired_file_does_not_block_other_changes(place: Place) -> None:
    place.write(a=guard("a"), b=bundle(guard("b"), expires_at=SOON))
    place.start()
    place.now += timedelta(seconds=2)

    assert (place.change(a=guard("a-2")), [*place.refused]) == (["a-2", "b"], [])
    assert (place.force(), [*place.refused]) == (["a-2", "b"], ["b"])


def test_missing_folder_does_not_block_other_changes(place: Place, other: Path) -> None:
    place.write(a=guard("a"))
    place.start(place.folder, other)
    seen = []
    for number, harm in enumerate(((other / "b.json").unlink, other.rmdir)):
        harm()
        seen.append((place.change(a=guard(f"a-{number}")), [*place.refused]))
    keeps = [place.reloader.keeps(str(path)) for path in (other, place.folder / "new.json")]
    other.mkdir()
    (other / "b.json").write_text(json.dumps(guard("b-2")))

    assert seen == [(["a-0", "b"], ["other"]), (["a-1", "b"], ["other"])]
    assert (keeps, place.take_errors().count(KEPT)) == ([True, False], 2)
    assert (place.change(), place.refused) == (["a-1", "b-2"], {})


class Parses:
    """Notes which files are parsed; can make one of them wait or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the real parser, which this calls."""
        self.files: list[str] = []
        self.held = self.failing = ""
        self.go_on = threading.Event()
        parse = parse_file

        # As the real one
        def count(file: str, *arguments: Any, **options: Any) -> ParsedFile:  # noqa: ANN401
            name = Path(file).stem
            self.files.append(name)
            assert name != self.held or self.go_on.wait(PATIENCE)
            if name == self.failing:
                raise MemoryError
            return parse(file, *arguments, **options)

        monkeypatch.setattr(last_good, "parse_file", count)

    def take(self) -> list[str]:
        """The files parsed since the last call."""
        found, self.files = self.files, []
        return found


@pytest.fixture
def parses(place: Place, monkeypatch: pytest.MonkeyPatch) -> Parses:
    monkeypatch.setattr(reload, "AT_ONCE", 1_000)
    place.write(a=guard("a"), b=guard("b"))
    place.start()
    return Parses(monkeypatch)


# Any field of loop_detection
def large(identity: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    return {**guard(identity, **more), "x-more": "x" * 1_000}


def test_unchanged_files_are_not_parsed_again(place: Place, parses: Parses) -> None:
    plans = place.reloader.engine.plans
    parsed = []
    for files in (
        {"c": b"[{", "a": [guard("a"), guard("a-2")]},
        {"a": [guard("a-3")]},
        {"a": None},
        {"a": [guard("a-4")]},
    ):
        place.change(**files)
        parsed.append(parses.take())

    assert parsed == [["a", "c"], ["a"], [], ["a"]]
    assert (place.ids, [*place.refused]) == (["a-4", "b"], ["c"])
    assert place.reloader.engine.plans[1] is plans[1]


def test_forced_reload_parses_every_file(place: Place, parses: Parses) -> None:
    place.force()

    assert parses.take() == ["a", "b"]
    assert (place.reloads, len(place.swapped)) == ((1, 0), 1)


def test_relations_between_files_follow_without_parsing_them(place: Place, parses: Parses) -> None:
    shadow = guard("shadow")
    shadow["spec"].update(mode="shadow", aliases={"0123456789abcdef": "ann"})
    seen = []
    for document in ([shadow], [guard("a"), shadow], []):
        place.change(b=document)
        plan = place.reloader.engine.find_plan("a")
        assert plan is not None
        found = len(place.reloader.engine.pairings), len(place.reloader.overlaps)
        seen.append((plan.paired, [*plan.aliases.values()], *found, bool(place.refused)))

    assert seen == [
        (True, ["ann"], 1, 1, False),
        (True, ["ann"], 1, 1, True),
        (False, [], 0, 0, False),
    ]
    assert parses.take() == ["b"] * 3


def test_large_change_does_not_delay_others(place: Place, parses: Parses) -> None:
    parses.held = "b"
    place.change(b=[large("b-2"), guard("b-3")])
    parses.take()
    seen = [place.change(a=guard("a-2")), place.change(a=guard("a-3"))]
    parses.go_on.set()

    assert [*seen, place.settle()] == [["a-2", "b"], ["a-3", "b"], ["a-3", "b-2", "b-3"]]
    assert place.reloads == (3, 0)
    assert parses.take().count("b") <= 1


def test_large_invalid_file_is_parsed_once(place: Place, parses: Parses) -> None:
    for count, action in enumerate(("explode", "burst"), start=1):
        place.change(b=[large("b", action=action)])
        place.settle()
        assert ([*place.refused], place.reloads) == (["b"], (0, count))
    parses.take()

    assert (place.change(a=guard("a-2")), parses.take()) == (["a-2", "b"], ["a"])
    assert place.take_errors().count(KEPT) == 2


def test_outdated_large_change_does_not_apply(place: Place, parses: Parses) -> None:
    parses.held = "a"
    place.change(a=[large("a-2")])
    place.write(a=guard("a-3"))
    parses.go_on.set()

    assert (place.settle(), place.reloads) == (["a-3", "b"], (1, 0))


def test_failure_to_parse_a_large_file_refuses_it(place: Place, parses: Parses) -> None:
    parses.failing = "a"
    place.change(a=[large("a-2")])

    assert (place.settle(), place.reloads) == (["a", "b"], (0, 1))
    assert place.refused == {"a": (f"{place.folder}/a.json: /: cannot be checked: MemoryError()",)}


def test_changes_of_one_folder_apply_together(place: Place, parses: Parses) -> None:
    place.change(a=[guard("a"), guard("moved")])
    parses.held = "b"
    seen = [place.change(a=[guard("a-2")], b=[large("b"), guard("moved")])]
    parses.go_on.set()

    assert [*seen, place.settle()] == [["a", "moved", "b"], ["a-2", "b", "moved"]]
    assert place.reloads == (2, 0)


def test_overlaps_are_reported_once(place: Place) -> None:
    place.write(a=guard("a"), b=guard("b"))
    place.start()
    place.change(a=[guard("a"), guard("a-2")])

    (overlap,) = place.reloader.overlaps
    assert (overlap.policy, overlap.other) == ("a", "b")
    assert place.caplog.messages.count(str(overlap)) == 1


OWN = {"pathPrefix": "/b/", "hosts": ["b.example.com"]}
HOSTILE: dict[str, dict[str, Any]] = {
    "all paths and hosts": policy("b-1", {"pathPrefix": "/"}),
    "a path that begins like its own": policy(
        "b-1", {"pathPrefix": "/bees", "hosts": ["b.example.com"]}
    ),
    "another path": policy("b-1", {"pathPrefixes": ["/b", "/a"], "hosts": ["b.example.com"]}),
    "another host": policy(
        "b-1", {"pathPrefix": "/b", "hosts": ["b.example.com", "a.example.com"]}
    ),
    "a route": policy("b-1", {"routes": ["a"], "hosts": ["b.example.com"]}),
    "another's id": policy("a", OWN),
    "an id of others": policy("a-new", OWN),
    "a kill switch": bundle(
        policy("b-1", OWN),
        kill_switches=[{"scope_key": "header:x", "scope_value": "y", "route": "/b/x"}],
    ),
    "a comparison": {
        "id": "b-1",
        "spec": {**policy("b-1", OWN)["spec"], "mode": "shadow", "canary_of": "a"},
    },
}


def test_namespaces_apply_at_every_reload(place: Place) -> None:
    (place.folder / "b").mkdir()
    place.write(**{"a": guard("a"), "b/b": policy("b-1", OWN, limit_keys=["jwt:org"])})
    place.start(namespace_of=(f"{place.folder}/b=host:b.example.com,path:/b,id:b-",))
    for name, document in HOSTILE.items():
        assert (place.change(**{"b/b": document}), [*place.refused], place.reloads[0]) == (
            ["a", "b-1"],
            ["b"],
            0,
        ), name

    assert (place.change(a=guard("b-2")), [*place.refused]) == (["a", "b-1"], ["b", "a"])


@pytest.mark.parametrize(
    "bad", [b"{", json.dumps(guard("a")).encode()], ids=["errors of its own", "another's id"]
)
def test_first_load_can_skip_invalid_files(place: Place, bad: bytes) -> None:
    place.write(a=guard("a"), b=bad)
    with pytest.raises(BundleErrors):
        place.start(place.folder, place.folder.parent / "missing")
    place.start(place.folder, place.folder.parent / "missing", on_bad_file="skip")

    assert (place.ids, sorted(place.refused), place.take_errors().count(NEW)) == (
        ["a"],
        ["b", "missing"],
        2,
    )
    assert (place.change(), place.take_errors()) == (["a"], [])
    assert (place.change(b=guard("b")), [*place.refused]) == (["a", "b"], ["missing"])


def test_first_load_without_valid_file_raises(place: Place) -> None:
    place.write(b=b"{")
    with pytest.raises(BundleErrors):
        place.start(on_bad_file="skip")


@pytest.mark.parametrize(
    ("before", "after", "warned"),
    [(2, 1, True), (2, 1.5, True), (1, 2, False), (1, 1, False), (2, None, False)],
)
def test_lower_bundle_version_applies_with_a_warning(
    place: Place, before: float, after: float | None, warned: bool
) -> None:
    place.write(p=bundle(guard("a"), bundle_version=before))
    place.start()

    assert place.change(p=bundle(guard("b"), bundle_version=after) if after else [guard("b")]) == [
        "b"
    ]
    assert ("bundle_version went down" in place.caplog.messages) == warned


@pytest.mark.parametrize("shadow", [False, True])
def test_global_shadow_expires_by_the_clock(place: Place, shadow: bool) -> None:
    end = NOW + timedelta(seconds=10)
    place.write(p=bundle(guard(), global_shadow={"enabled": True, "expires_at": end.isoformat()}))
    place.start(shadow=shadow)
    seen = [*place.modes]
    for place.now in (end - timedelta(seconds=1), end, end + timedelta(days=1)):
        place.change()
        seen += place.modes

    acting = "shadow" if shadow else "enforce"
    assert (seen, place.reloads) == (["shadow", "shadow", acting, acting], (0, 0))
    assert (
        shadow
        or len(place.swapped)
        == place.caplog.messages.count("global_shadow expired, its policies act again")
        == 1
    )


def test_expired_bundle_stays_active_and_is_reported(place: Place) -> None:
    place.write(p=bundle(guard(), expires_at=SOON), q=guard("q"))
    place.start()
    seen = [(place.ids, place.read("policy_expired"))]
    place.now += timedelta(seconds=2)
    seen += [
        (place.change(**files), place.read("policy_expired")) for files in ({}, {}, {"p": None})
    ]

    assert seen == [(["p", "q"], 0), (["p", "q"], 1), (["p", "q"], 1), (["q"], 0)]
    assert place.take_errors() == ["bundle expired, its policies keep acting"]


def watch(place: Place, scenario: Coroutine[Any, Any, None]) -> None:
    async def run() -> None:
        task = asyncio.create_task(place.reloader.watch(place.swapped.append))
        try:
            await scenario
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    place.runner.run(run())


def config_map(place: Place, version: int, identity: str) -> None:
    """Publish as kubelet does: a new directory, one rename of `..data`, the old one goes."""
    new = place.folder / f"..{version}"
    new.mkdir()
    (new / "p.json").write_text(json.dumps(guard(identity)))
    link = place.folder / "..data_tmp"
    link.symlink_to(new.name)
    link.rename(place.folder / "..data")
    if version == 1:
        (place.folder / "p.json").symlink_to("..data/p.json")
    else:
        shutil.rmtree(place.folder / f"..{version - 1}")


@pytest.mark.parametrize("name", ["", "p.json"])
def test_watch_follows_a_config_map(place: Place, name: str) -> None:
    config_map(place, 1, "a")
    place.start(place.folder / name)

    async def scenario() -> None:
        for version, identity in enumerate(("b", "c", "d"), start=2):
            config_map(place, version, identity)
            await place.until(identity)

    watch(place, scenario())


@pytest.mark.slow
def test_watch_follows_every_way_a_file_changes(place: Place, other: Path) -> None:
    place.write(p=guard("a"))
    place.start()
    target = other / "b.json"

    async def scenario() -> None:
        place.write(p=guard("c"))
        await place.until("c")
        (other / "new").write_text(json.dumps(guard("d")))
        (other / "new").rename(place.folder / "p.json")
        await place.until("d")
        (place.folder / "deep" / "er").mkdir(parents=True)
        for identity in ("e", "f"):
            place.write(**{"deep/er/q": guard(identity)})
            await place.until(identity, "d")
        (place.folder / "l.json").symlink_to(target)
        await place.until("f", "b", "d")
        target.write_text(json.dumps(guard("g")))
        await place.until("f", "g", "d")
        shutil.rmtree(place.folder)
        place.folder.mkdir()
        place.write(p=guard("h"))
        await place.until("h")

    watch(place, scenario())
