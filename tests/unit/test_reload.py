"""Policies change while the server runs; a bad change keeps the last good ones."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import shutil
import threading
from collections.abc import Coroutine, Iterable
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


def guard(identity: str = "p", **more: Any) -> dict[str, Any]:  # noqa: ANN401  # any field of loop_detection
    """A policy without warnings."""
    return policy(identity, {"pathPrefix": "/"}, limit_keys=["jwt:org"], **more)


NOTED = {**guard("p"), "x-owner": "team a"}
FILES: list[object] = [bundle(NOTED, global_shadow={"enabled": True}), NOTED, [NOTED]]


class Place:
    """A policy directory, a Reloader over it, and a clock that stands still."""

    def __init__(self, folder: Path) -> None:
        """Nothing is loaded until `start`."""
        self.folder = folder
        self.now = NOW
        self.metrics = Metrics()
        self.swapped: list[Engine] = []

    def write(self, document: object, name: str = "p.json") -> None:
        """Replace a file; bytes as they are."""
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        (self.folder / name).write_bytes(data)

    def start(self, *paths: Path, **settings: Any) -> None:  # noqa: ANN401  # any setting
        """Load for the first time."""
        names = tuple(map(str, paths or (self.folder,)))
        self.reloader = Reloader(Settings(policy=names, **settings), self.metrics)

    def reload(self, *, force: bool = False) -> None:
        """One reload, to its end."""
        asyncio.run(self.reloader.reload(self.swapped.append, force=force))

    def reloads(self, result: str) -> float:
        """`policy_reloads_total`."""
        return self.metrics.registry.get_sample_value("loopguard_policy_reloads_total", {"result": result}) or 0

    @property
    def ids(self) -> list[str]:
        """The policies in force; the engine that was swapped in last is the Reloader's own."""
        assert self.swapped[-1:] in ([], [self.reloader.engine])
        return [plan.id for plan in self.reloader.engine.plans]

    async def until(self, *ids: str) -> None:
        """Wait until these policies are in force."""
        async with asyncio.timeout(PATIENCE):
            while self.ids != list(ids):  # noqa: ASYNC110  # polling is what a bystander can do
                await asyncio.sleep(0.01)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Place:
    """An empty policy directory."""
    caplog.set_level(logging.INFO)
    made = Place(tmp_path / "policies")
    made.folder.mkdir()
    monkeypatch.setattr(reload, "_now", lambda: made.now)
    return made


def test_a_change_is_taken(place: Place) -> None:
    """A changed, a new and a removed file each act after one reload, and each counts once."""
    place.write(guard("a"))
    place.start()
    seen = [place.ids]
    for name, document in (("p.json", guard("b")), ("q.json", [guard("c"), guard("d")]), ("p.json", None)):
        if document is None:
            (place.folder / name).unlink()
        else:
            place.write(document, name)
        place.reload()
        seen.append(place.ids)

    assert seen == [["a"], ["b"], ["b", "c", "d"], ["c", "d"]]
    assert (place.reloads("ok"), place.reloads("error"), len(place.swapped)) == (3, 0, 3)


def test_a_load_leaves_nothing_to_the_garbage_collector(place: Place) -> None:
    """What was loaded is frozen, and collections continue, after an accepted load and after a refused one."""
    place.write(guard("a"))
    place.start()
    place.write(guard("b"))
    place.reload()
    left = {id(thing) for thing in gc.get_objects()}  # all that a collection would walk
    on = [gc.isenabled()]
    place.write(b"{")
    place.reload()
    on.append(gc.isenabled())

    assert not {id(plan) for plan in place.reloader.engine.plans} & left
    assert place.reloads("error") == 1
    assert on == [True, True]


def count_models() -> int:
    """The objects of policy files, as they are validated, that are still there."""
    gc.unfreeze()
    return sum(JsonObject in type(thing).__mro__ for thing in gc.get_objects())  # pydantic's isinstance takes a second


@pytest.mark.deep
@pytest.mark.parametrize("file", FILES, ids=["bundle", "policy", "list"])
def test_of_policy_files_only_what_runs_is_kept(place: Place, file: object) -> None:
    """Once they are compiled nothing holds the policies as they were read, and once they are replaced nothing the old ones."""
    before = count_models()
    place.write(file)
    place.start()
    started = count_models()
    old = {id(plan) for plan in place.reloader.engine.plans}
    place.write([guard("q")])
    asyncio.run(place.reloader.reload(lambda _: None))

    assert (started, count_models()) == (before, before)
    assert place.ids == ["q"]
    assert not [thing for thing in gc.get_objects() if isinstance(thing, Plan) and id(thing) in old]


@pytest.mark.slow
def test_nothing_is_kept_of_a_refused_file(place: Place) -> None:
    """A file with one error among a hundred good policies leaves no policy in memory."""
    place.write(guard("p"))
    place.start()
    before = count_models()
    place.write([*(guard(f"q-{number}") for number in range(100)), guard("r", action="explode")])
    place.reload()

    assert (count_models(), place.reloads("error")) == (before, 1)


@pytest.mark.parametrize("file", FILES, ids=["bundle", "policy", "list"])
def test_policies_in_force_are_listed_as_they_are_written(place: Place, file: object) -> None:
    """What is shown is what the files hold, notes and all, also when they have changed on disk into something bad."""
    place.write(file)
    place.start()
    place.write(b"{")
    place.reload()

    (listed,) = place.reloader.list_policies()

    assert listed == (place.reloader.sources[0], [NOTED])


def test_what_is_no_change_does_nothing(place: Place) -> None:
    """The same bytes again, or a file that is no policy, reload nothing."""
    place.write(guard())
    place.start()
    place.write(guard())
    place.write(b"some lines\n", "loopguard.log")
    place.reload()

    assert (place.reloads("ok"), place.swapped) == (0, [])


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages logged as errors since the last call."""
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    caplog.clear()
    return found


KEPT = "policies not reloaded, the last good ones stay in force"
NEW = "policies not loaded: no version of the file has been in force"


def test_a_bad_file_keeps_the_last_good(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Every error of a bad change is logged, it counts exactly once however often it is looked at, and nothing changes."""
    place.write(guard())
    place.start()
    before = place.reloader.engine
    place.write(bundle(guard("q", action="explode"), bundle_version=0))
    for _ in range(3):
        place.reload()

    assert errors(caplog) == [
        f"{place.folder}/p.json: /bundle_version: bundle_version must be greater than 0, not 0",
        (
            f"{place.folder}/p.json: /policies/0/spec/loop_detection/action: "
            "action must be one of reject, land, throttle, steer, warn, not 'explode'"
        ),
        KEPT,
    ]
    assert (place.reloads("error"), place.reloads("ok"), place.swapped) == (1, 0, [])
    assert place.reloader.engine is before


def test_a_refused_reload_shows_until_the_files_are_good_again(place: Place) -> None:
    """From a bad change, or a file that is gone, until what lies there is good; also when it is the same as before."""
    place.write(guard("a"))
    place.start()
    seen = []
    for content in (guard("b"), b"{", None, guard("b"), None, guard("b")):
        if content is None:
            (place.folder / "p.json").unlink()
        else:
            place.write(content)
        place.reload()
        refusal = place.reloader.refusal
        assert refusal is None or refusal.count == len(refusal.errors) > 0
        seen.append((place.metrics.registry.get_sample_value("loopguard_policy_reload_refused"), refusal is not None))

    assert seen == [(0, False), (1, True), (1, True), (0, False), (1, True), (0, False)]


def test_every_bad_change_counts(place: Place) -> None:
    """A second bad change counts although its error reads the same; going back to what was good is a reload."""
    place.write(guard())
    place.start()
    for document in (b"{", b"{ ", guard()):
        place.write(document)
        place.reload()

    assert (place.reloads("error"), place.reloads("ok"), place.ids) == (2, 1, ["p"])


@pytest.mark.parametrize("whole", [False, True])
def test_a_deleted_file_keeps_the_last_good(place: Place, caplog: pytest.LogCaptureFixture, whole: object) -> None:
    """While the file, or its directory, is missing the policies stay; that is one failure each time it goes."""
    place.write(guard())
    place.start(place.folder / "p.json" if not whole else place.folder)
    for _ in range(2):
        shutil.rmtree(place.folder)
        place.reload()
        place.reload()
        place.folder.mkdir()
        place.write(guard())
        place.reload()

    missing = place.folder if whole else place.folder / "p.json"
    assert errors(caplog) == [f"{missing}: /: cannot be read: No such file or directory", KEPT] * 2
    assert (place.reloads("error"), place.reloads("ok"), place.ids) == (2, 0, ["p"])


def test_whatever_a_change_provokes_the_last_good_stays(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even an unforeseen error is a failed reload, not the end of reloading."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("unforeseen")

    place.write(guard())
    place.start()
    place.write(guard("q"))
    monkeypatch.setattr(reload, "choose", broken)
    place.reload()
    monkeypatch.undo()
    place.write(guard("r"))
    place.reload()

    assert errors(caplog) == ["unforeseen", KEPT]
    assert (place.reloads("error"), place.reloads("ok"), place.ids) == (1, 1, ["r"])


def test_a_file_system_that_never_answers_is_a_failed_reload(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading is bounded, and counts once; one thread at most waits; when the file system is back, so are reloads."""
    back = threading.Event()
    waiting: list[threading.Thread] = []

    def stuck(paths: Iterable[str]) -> dict[str, bytes | BundleError]:
        waiting.append(threading.current_thread())
        assert back.wait(PATIENCE)
        return read_each(paths)

    place.write(guard())
    place.start()
    monkeypatch.setattr(reload, "_READ_SECONDS", 0.01)
    monkeypatch.setattr(reload, "read_each", stuck)
    for _ in range(3):
        place.reload()
    found = errors(caplog), place.reloads("error"), len(waiting), waiting[0].daemon
    back.set()
    waiting[0].join(PATIENCE)
    monkeypatch.undo()
    place.write(guard("q"))
    place.reload()

    assert found == ([f"{place.folder}: /: could not be read within 0.01 s", KEPT], 1, 1, True)
    assert (place.reloads("ok"), place.ids) == (1, ["q"])


def test_parts_that_are_not_enforced_are_refused_in_a_reload(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """No limit is lost through a reload either, unless the server was told to continue without it."""
    item = guard("q")
    item["spec"]["rules"] = [RULE | {"limit_keys": ["ip:country"]}]
    place.write(guard())
    place.start()
    place.write(item)
    place.reload()
    ids = place.ids
    place.start(allow_unenforced=True)

    idle = "so the rule r never applies; use ip:address or a header that your proxy sets, such as header:x-country"
    derived = f"the descriptor ip:country cannot be derived by Loopguard, {idle}"
    part = f"{place.folder}/p.json: /spec/rules/0/limit_keys/0: {derived}"
    assert errors(caplog) == [f"{part}; remove it, or start with --allow-unenforced", KEPT]
    assert (ids, [plan.id for plan in place.reloader.engine.plans]) == (["p"], ["q"])


def test_a_reload_says_what_changed(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """The line names the policies that came, went and changed, a few of each; a reload of the same names none."""
    place.write(bundle(guard("same"), guard("gone"), guard("other")))
    place.start()
    place.write(bundle(guard("same"), guard("other", action="warn"), *(guard(f"new-{number}") for number in range(12))))
    with caplog.at_level(logging.INFO):
        place.reload()
        place.reload(force=True)

    first, second = (vars(record)["fields"] for record in caplog.records if record.message == "policies reloaded")
    added = ", ".join(f"new-{number}" for number in range(10))
    assert (first["added"], first["removed"], first["changed"]) == (f"{added} and 2 more", "gone", "other")
    assert not {"added", "removed", "changed"} & second.keys()


def refused(place: Place) -> dict[str, tuple[str, ...]]:
    """The errors of each refused file, by its name; the metric names the same files."""
    found = {Path(file).name: tuple(refusal.errors) for file, refusal in place.reloader.refusals.items()}
    (family,) = (each for each in place.metrics.registry.collect() if each.name == "loopguard_policy_file_refused")
    assert {Path(sample.labels["file"]).name for sample in family.samples} == {*found}
    return found


def test_a_bad_file_keeps_no_other_out(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """While one team's file is bad, it acts as it last was, and the other's changes act; the bad one counts once."""
    place.write(guard("a-1"), "a.json")
    place.write(guard("b-1"), "b.json")
    place.start()
    place.write(b"{", "b.json")
    place.write(guard("a-2"), "a.json")
    place.reload()
    seen = [place.ids]
    place.write(guard("a-3"), "a.json")
    place.reload()
    seen.append(place.ids)
    bad = refused(place)
    place.write(guard("b-2"), "b.json")
    place.reload()

    assert seen == [["a-2", "b-1"], ["a-3", "b-1"]]
    assert ([*bad], errors(caplog)[1:]) == (["b.json"], [KEPT])
    assert (place.ids, refused(place), place.reloads("error"), place.reloads("ok")) == (["a-3", "b-2"], {}, 1, 3)


def test_a_new_bad_file_is_left_out(place: Place) -> None:
    """A file that was never good has no policies, and does not keep out the others; without it, nothing is refused."""
    place.write(guard("a"), "a.json")
    place.start()
    place.write(guard("b", action="explode"), "b.json")
    place.write(guard("a-2"), "a.json")
    place.reload()
    before = place.ids, [*refused(place)], place.reloader.keeps(f"{place.folder}/b.json")
    (place.folder / "b.json").unlink()
    place.reload()

    assert before == (["a-2"], ["b.json"], False)
    assert (place.ids, refused(place)) == (["a-2"], {})


@pytest.mark.parametrize("thief", ["0.json", "z.json"])
def test_an_id_stays_with_the_file_that_has_it(place: Place, thief: str) -> None:
    """A file that takes another's id is refused, whichever comes first; it acts once the id is free."""
    place.write(guard("a"), "m.json")
    place.write(guard("b"), thief)
    place.start()
    place.write([guard("b-2"), guard("a")], thief)
    place.write([guard("a"), guard("a-2")], "m.json")
    place.reload()
    stolen = sorted(place.ids), [*refused(place)]
    place.write(guard("a-2"), "m.json")
    place.reload()

    assert stolen == (["a", "a-2", "b"], [thief])
    assert (sorted(place.ids), refused(place)) == (["a", "a-2", "b-2"], {})


def test_files_that_contradict_each_other_return_to_what_was_good(place: Place) -> None:
    """If a refused file takes back an id that another one has taken over meanwhile, the other one is refused, too."""
    place.write(guard("x"), "a.json")
    place.write(guard("y"), "b.json")
    place.start()
    place.write(b"{", "a.json")  # gives up x
    place.write(guard("x"), "b.json")
    place.reload()

    assert (place.ids, [*refused(place)]) == (["x", "y"], ["a.json", "b.json"])


def test_a_policy_can_be_removed_although_another_file_compares_with_it(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """A `canary_of` keeps no other team's policy in force: its own goes on without a comparison, with a warning."""
    place.write([guard("live"), guard("a")], "a.json")
    candidate = policy("candidate", {"pathPrefix": "/"}, limit_keys=["jwt:org"])
    candidate["spec"] |= {"mode": "shadow", "canary_of": "live"}
    place.write(candidate, "b.json")
    place.start()
    pairs = [len(place.reloader.engine.pairings)]
    place.write(guard("a"), "a.json")
    place.reload()
    pairs.append(len([pair for pair in place.reloader.engine.pairings if pair.live == "live"]))

    assert (place.ids, pairs, refused(place)) == (["a", "candidate"], [1, 0], {})
    assert [line for line in caplog.messages if "canary_of must name a loaded policy" in line]


def test_an_expired_file_keeps_no_other_out(place: Place) -> None:
    """A bundle that expired while it was in force stays, also when another file changes; a reload by order refuses it."""
    place.write(bundle(guard("b"), expires_at=(NOW + timedelta(seconds=1)).isoformat()), "b.json")
    place.write(guard("a"), "a.json")
    place.start()
    place.now += timedelta(seconds=2)
    place.write(guard("a-2"), "a.json")
    place.reload()
    seen = [(place.ids, [*refused(place)])]
    place.reload(force=True)
    seen.append((place.ids, [*refused(place)]))

    assert seen == [(["a-2", "b"], []), (["a-2", "b"], ["b.json"])]


def test_a_missing_folder_keeps_no_other_out(place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of two folders, one that is gone, empty or closed keeps its policies, and the other one's changes act."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "b.json").write_text(json.dumps(guard("b")))
    place.write(guard("a-0"), "a.json")
    place.start(place.folder, other)
    seen = []
    for number, harm in enumerate(((other / "b.json").unlink, other.rmdir), start=1):
        harm()
        place.write(guard(f"a-{number}"), "a.json")
        place.reload()
        seen.append((place.ids, [*refused(place)], place.reloader.keeps(str(other))))
    other.mkdir()
    (other / "b.json").write_text(json.dumps(guard("b-2")))
    place.reload()

    assert seen == [(["a-1", "b"], ["other"], True), (["a-2", "b"], ["other"], True)]
    assert (place.ids, refused(place), errors(caplog).count(KEPT)) == (["a-2", "b-2"], {}, 2)


def test_a_folder_that_never_answers_delays_no_other(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each path is read for itself: one that hangs is waited for once, and its policies stay."""
    back = threading.Event()
    other = tmp_path / "other"
    other.mkdir()
    (other / "b.json").write_text(json.dumps(guard("b")))

    def stuck(paths: Iterable[str]) -> dict[str, bytes | BundleError]:
        assert str(other) not in [*paths] or back.wait(PATIENCE)
        return read_each(paths)

    place.write(guard("a"))
    place.start(place.folder, other)
    monkeypatch.setattr(reload, "_READ_SECONDS", 0.5)
    monkeypatch.setattr(reload, "read_each", stuck)
    place.write(guard("a-2"))
    place.reload()
    found = place.ids, [*refused(place)]
    monkeypatch.setattr(reload, "_READ_SECONDS", PATIENCE)  # waiting again would take as long
    place.write(guard("a-3"))
    place.reload()
    back.set()

    assert found == (["a-2", "b"], ["other"])
    assert place.ids == ["a-3", "b"]


class Judge:
    """Notes which files are judged; can make one of them wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In place of the real one, which it calls."""
        self.judged: list[str] = []
        self.held = ""
        self.go_on = threading.Event()
        parse = parse_file

        def count(file: str, *arguments: Any, **options: Any) -> ParsedFile:  # noqa: ANN401  # as the real one
            self.judged.append(Path(file).name)
            assert Path(file).name != self.held or self.go_on.wait(PATIENCE)
            return parse(file, *arguments, **options)

        monkeypatch.setattr(last_good, "parse_file", count)

    def take(self) -> list[str]:
        """The files judged since the last call."""
        found, self.judged = self.judged, []
        return found


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Changes of more than a thousand bytes are large."""
    monkeypatch.setattr(reload, "AT_ONCE", 1_000)
    return Judge(monkeypatch)


LARGE = "x" * 1_000


def test_unchanged_files_are_not_judged_again(place: Place, judge: Judge) -> None:
    """A change judges its own file alone; the others' compiled policies are taken over, and bad files stay judged."""
    for name in "abc":
        place.write([guard(name)], f"{name}.json")
    place.start()
    plans = {plan.id: plan for plan in place.reloader.engine.plans}
    judge.take()
    place.write(b"[{", "c.json")
    place.write([guard("a"), guard("a-2")], "a.json")
    place.reload()
    judged = [judge.take()]
    for document in ([guard("a-3")], None, [guard("a-4")]):
        if document is None:
            (place.folder / "a.json").unlink()
        else:
            place.write(document, "a.json")
        place.reload()
        judged.append(judge.take())

    assert judged == [["a.json", "c.json"], ["a.json"], [], ["a.json"]]
    assert (place.ids, [*refused(place)]) == (["a-4", "b", "c"], ["c.json"])
    assert place.reloader.engine.plans[1:] == [plans["b"], plans["c"]]


def test_a_forced_reload_judges_every_file(place: Place, judge: Judge) -> None:
    """SIGHUP trusts no earlier result."""
    place.write(guard("a"), "a.json")
    place.write(guard("b"), "b.json")
    place.start()
    judge.take()
    place.reload(force=True)

    assert judge.take() == ["a.json", "b.json"]
    assert (place.reloads("ok"), len(place.swapped)) == (1, 1)


def test_what_files_mean_for_each_other_follows_without_judging_them(place: Place, judge: Judge) -> None:
    """Callers' names, comparisons, overlaps and duplicate ids of unchanged files follow the other file's changes."""
    live = guard("live")
    place.write(live, "a.json")
    place.write([], "b.json")
    place.start()
    judge.take()
    shadow = guard("shadow")
    shadow["spec"].update(mode="shadow", aliases={"0123456789abcdef": "ann"})
    seen = []
    for document in ([shadow], [live, shadow], []):
        place.write(document, "b.json")
        place.reload()
        plan = place.reloader.engine.find_plan("live")
        assert plan is not None
        found = len(place.reloader.engine.pairings), len(place.reloader.overlaps)
        seen.append((plan.paired, [*plan.aliases.values()], *found, bool(refused(place))))

    assert seen == [(True, ["ann"], 1, 1, False), (True, ["ann"], 1, 1, True), (False, [], 0, 0, False)]
    assert judge.take() == ["b.json"] * 3


def test_a_large_change_delays_no_other(place: Place, judge: Judge) -> None:
    """While a large file is judged, it acts as it last was, others' changes act; then it acts, without being judged again."""
    place.write(guard("a"), "a.json")
    place.write(guard("b"), "b.json")
    place.start()
    seen = []

    async def change() -> None:
        judge.held = "b.json"
        place.write([{**guard("b-2"), "x-more": LARGE}, guard("b-3")], "b.json")
        await place.reloader.reload(place.swapped.append)
        judge.take()
        for name in ("a-2", "a-3"):
            place.write(guard(name), "a.json")
            await place.reloader.reload(place.swapped.append)
            seen.append(place.ids)
        judge.go_on.set()
        await place.reloader.settle()

    asyncio.run(change())

    assert seen == [["a-2", "b"], ["a-3", "b"]]
    assert (place.ids, place.reloads("ok")) == (["a-3", "b-2", "b-3"], 3)
    assert judge.take().count("b.json") <= 1


def test_a_large_file_that_is_bad_is_judged_once(place: Place, judge: Judge, caplog: pytest.LogCaptureFixture) -> None:
    """It is refused as any other, keeps what was good, and later changes of others do not judge it again."""
    place.write(guard("a"), "a.json")
    place.write(guard("b"), "b.json")
    place.start()
    seen = []

    async def change() -> None:
        for text in ("explode", "burst"):
            place.write([{**guard("b", action=text), "x-more": LARGE}], "b.json")
            await place.reloader.reload(place.swapped.append)
            await place.reloader.settle()
            seen.append(([*refused(place)], place.reloads("error")))
        judge.take()
        place.write(guard("a-2"), "a.json")
        await place.reloader.reload(place.swapped.append)

    asyncio.run(change())

    assert seen == [(["b.json"], 1), (["b.json"], 2)]
    assert errors(caplog).count(KEPT) == 2
    assert (place.ids, judge.take()) == (["a-2", "b"], ["a.json"])


def test_a_large_change_that_is_gone_by_then_does_not_act(place: Place, judge: Judge) -> None:
    """Of a file that changes faster than it is judged, only what is on disk acts."""
    place.write(guard("a"), "a.json")
    place.start()

    async def change() -> None:
        judge.held = "a.json"
        place.write([{**guard("a-2"), "x-more": LARGE}], "a.json")
        await place.reloader.reload(place.swapped.append)
        place.write(guard("a-3"), "a.json")
        judge.go_on.set()
        await place.reloader.settle()

    asyncio.run(change())

    assert (place.ids, place.reloads("ok")) == (["a-3"], 1)


@pytest.mark.usefixtures("judge")
def test_a_failure_to_judge_a_large_file_refuses_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong in the background is an error of the file, and is not tried over and over again."""
    place.write(guard("a"), "a.json")
    place.start()

    def fail(*_: object, **__: object) -> ParsedFile:
        raise MemoryError

    async def change() -> None:
        monkeypatch.setattr(last_good, "parse_file", fail)
        place.write([{**guard("a-2"), "x-more": LARGE}], "a.json")
        await place.reloader.reload(place.swapped.append)
        await place.reloader.settle()

    asyncio.run(change())

    (told,) = refused(place)["a.json"]
    assert told.endswith("a.json: /: cannot be judged: MemoryError()")
    assert (place.ids, place.reloads("error")) == (["a"], 1)


def test_files_of_one_folder_that_change_together_act_together(place: Place, judge: Judge) -> None:
    """A policy that moves from a small file to a large one is in force all the time."""
    place.write([guard("a"), guard("moved")], "a.json")
    place.write(guard("b"), "b.json")
    place.start()
    judge.held = "b.json"
    seen = []

    async def change() -> None:
        place.write([guard("a-2")], "a.json")
        place.write([{**guard("b"), "x-more": LARGE}, guard("moved")], "b.json")
        await place.reloader.reload(place.swapped.append)
        seen.append(place.ids)
        judge.go_on.set()
        await place.reloader.settle()

    asyncio.run(change())

    assert seen == [["a", "moved", "b"]]
    assert (place.ids, place.reloads("error")) == (["a-2", "b", "moved"], 0)


def test_overlaps_are_reported_once(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Policies of two files that meet the same requests are a warning when they begin to, not at each reload."""
    place.write(guard("a"), "a.json")
    place.write(guard("b"), "b.json")
    place.start()
    place.write([guard("a"), guard("a-2")], "a.json")
    place.reload()

    (overlap,) = place.reloader.overlaps
    assert (overlap.policy, overlap.other) == ("a", "b")
    assert caplog.messages.count(str(overlap)) == 1


NAMESPACES = ("{}/b=host:b.example.com,path:/b,id:b-",)


def test_a_namespace_holds_at_every_reload(place: Place) -> None:
    """A hostile team takes neither requests, ids, callers' names nor kill switches of the others: its changes are refused."""
    (place.folder / "b").mkdir()
    own = {"pathPrefix": "/b/", "hosts": ["b.example.com"]}
    place.write(policy("b-1", own, limit_keys=["jwt:org"]), "b/b.json")
    place.write(guard("a"), "a.json")
    place.start(namespace_of=tuple(text.format(place.folder) for text in NAMESPACES))
    hostile = [
        policy("b-1", {"pathPrefix": "/"}),
        policy("b-1", {"pathPrefix": "/bees", "hosts": ["b.example.com"]}),
        policy("b-1", {"pathPrefixes": ["/b", "/a"], "hosts": ["b.example.com"]}),
        policy("b-1", {"pathPrefix": "/b", "hosts": ["b.example.com", "a.example.com"]}),
        policy("b-1", {"routes": ["a"], "hosts": ["b.example.com"]}),
        policy("a", own),
        policy("a-new", own),
        bundle(policy("b-1", own), kill_switches=[{"scope_key": "header:x", "scope_value": "y", "route": "/b/x"}]),
        {"id": "b-1", "spec": {**policy("b-1", own)["spec"], "mode": "shadow", "canary_of": "a"}},
    ]
    for document in hostile:
        place.write(document, "b/b.json")
        place.reload()
        assert (place.ids, [*refused(place)], place.reloads("ok")) == (["a", "b-1"], ["b.json"], 0), document
    place.write(guard("b-2"), "a.json")
    place.reload()

    assert (place.ids, [*refused(place)]) == (["a", "b-1"], ["b.json", "a.json"])


@pytest.mark.parametrize("bad", [b"{", json.dumps(guard("a")).encode()], ids=["errors of its own", "another's id"])
def test_a_first_load_can_skip_bad_files(place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: bytes) -> None:
    """With `--on-bad-file skip`, the other files act; each bad one is named, and acts as soon as it is good."""
    place.write(guard("a"), "a.json")
    place.write(bad, "b.json")
    with pytest.raises(BundleErrors):
        place.start(place.folder, tmp_path / "missing")
    place.start(place.folder, tmp_path / "missing", on_bad_file="skip")
    started = place.ids, sorted(refused(place)), errors(caplog).count(NEW)
    place.reload()
    repeated = len(errors(caplog))
    place.write(guard("b"), "b.json")
    place.reload()

    assert started == (["a"], ["b.json", "missing"], 2)
    assert repeated == 0
    assert (place.ids, [*refused(place)]) == (["a", "b"], ["missing"])


def test_a_first_load_without_any_good_file_raises(place: Place) -> None:
    """There is nothing to act on, so skipping would switch the guard off."""
    place.write(b"{", "b.json")
    with pytest.raises(BundleErrors):
        place.start(on_bad_file="skip")


@pytest.mark.parametrize(
    ("before", "after", "warned"), [(2, 1, True), (2, 1.5, True), (1, 2, False), (1, 1, False), (2, None, False)]
)
def test_a_lower_bundle_version_is_taken_with_a_warning(
    place: Place, caplog: pytest.LogCaptureFixture, before: float, after: float | None, warned: object
) -> None:
    """Rolling back works, and is said; a file without a version has none to compare."""
    place.write(bundle(guard("a"), bundle_version=before))
    place.start()
    place.write(bundle(guard("b"), bundle_version=after) if after else [guard("b")])
    place.reload()

    assert ("bundle_version went down" in caplog.messages) is warned
    assert (place.ids, place.reloads("ok")) == (["b"], 1)


def info(place: Place) -> set[str]:
    """The bundle versions that `policy_info` shows."""
    (family,) = (family for family in place.metrics.registry.collect() if family.name == "loopguard_policy_info")
    assert all(sample.value == 1 and len(sample.labels["sha256"]) == 64 for sample in family.samples)
    return {sample.labels["bundle_version"] for sample in family.samples}


def test_policy_info_follows(place: Place) -> None:
    """`policy_info` has one sample for each file in force, with its version to the last digit; older ones are gone."""
    place.write(bundle(guard("a"), bundle_version=202606010001))
    place.write(guard("b"), "q.json")
    place.start()
    before = info(place)
    (place.folder / "q.json").unlink()
    place.write(bundle(guard("a"), bundle_version=1.5))
    place.reload()

    assert (before, info(place)) == ({"202606010001", ""}, {"1.5"})


def modes(place: Place) -> list[str]:
    """The mode of each policy in force."""
    return [plan.mode for plan in place.reloader.engine.plans]


def test_global_shadow_expires_by_the_clock(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """No file has to change for the policies to act again at `expires_at`; that is no reload, and it is logged."""
    end = NOW + timedelta(seconds=10)
    place.write(bundle(guard(), global_shadow={"enabled": True, "expires_at": end.isoformat()}))
    place.start()
    seen = [modes(place)]
    for moment in (end - timedelta(seconds=1), end, end + timedelta(days=1)):
        place.now = moment
        place.reload()
        seen.append(modes(place))

    assert seen == [["shadow"], ["shadow"], ["enforce"], ["enforce"]]
    assert (len(place.swapped), place.swapped[0], place.reloads("ok")) == (1, place.reloader.engine, 0)
    assert caplog.messages.count("global_shadow expired, its policies act again") == 1


def test_shadow_for_all_outlives_global_shadow(place: Place) -> None:
    """With `--shadow` the policies stay in shadow mode when `global_shadow` ends."""
    place.write(bundle(guard(), global_shadow={"enabled": True, "expires_at": (NOW + timedelta(seconds=1)).isoformat()}))
    place.start(shadow=True)
    place.now += timedelta(seconds=2)
    place.reload()

    assert modes(place) == ["shadow"]


def test_an_expired_bundle_keeps_acting_and_is_reported(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """A bundle that expires while it runs is logged once and counted in `policy_expired` until it is replaced."""

    def expired() -> float | None:
        return place.metrics.registry.get_sample_value("loopguard_policy_expired")

    place.write(bundle(guard(), expires_at=(NOW + timedelta(seconds=1)).isoformat()))
    place.write(guard("q"), "q.json")
    place.start()
    counts = [expired()]
    place.now += timedelta(seconds=2)
    for _ in range(2):
        place.reload()
        counts.append(expired())
    ids = place.ids
    (place.folder / "p.json").unlink()
    place.reload()
    counts.append(expired())

    assert errors(caplog) == ["bundle expired, its policies keep acting"]
    assert (counts, ids, place.ids) == ([0, 1, 1, 0], ["p", "q"], ["q"])


def watched(place: Place, scenario: Coroutine[Any, Any, None]) -> None:
    """Run a scenario beside `watch`."""

    async def run() -> None:
        task = asyncio.create_task(place.reloader.watch(place.swapped.append))
        try:
            await scenario
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def config_map(place: Place, version: int, identity: str) -> None:
    """Publish a file as kubelet does: a new directory, then one rename of the `..data` link, then the old one goes."""
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
def test_the_watch_follows_a_config_map(place: Place, name: str) -> None:
    """Swapping `..data` is a change, time after time, whether the directory or the file in it was given."""
    config_map(place, 1, "a")
    place.start(place.folder / name)

    async def scenario() -> None:
        for version, identity in enumerate(("b", "c", "d"), start=2):
            config_map(place, version, identity)
            await place.until(identity)

    watched(place, scenario())


def test_the_watch_follows_every_way_a_file_changes(place: Place, tmp_path: Path) -> None:
    """Written in place, replaced by a rename, in a new directory, behind a link, deleted and back: all are noticed."""
    place.write(guard("a"))
    place.start()

    async def scenario() -> None:
        place.write(guard("b"))
        await place.until("b")
        (tmp_path / "new").write_text(json.dumps(guard("c")))
        (tmp_path / "new").rename(place.folder / "p.json")
        await place.until("c")
        (place.folder / "deep" / "er").mkdir(parents=True)
        place.write(guard("d"), "deep/er/q.json")
        await place.until("d", "c")
        place.write(guard("e"), "deep/er/q.json")
        await place.until("e", "c")
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "l.json").write_text(json.dumps(guard("f")))
        (place.folder / "l.json").symlink_to(tmp_path / "elsewhere" / "l.json")
        await place.until("e", "f", "c")
        (tmp_path / "elsewhere" / "l.json").write_text(json.dumps(guard("g")))
        await place.until("e", "g", "c")
        shutil.rmtree(place.folder)
        place.folder.mkdir()
        place.write(guard("h"))
        await place.until("h")

    watched(place, scenario())
