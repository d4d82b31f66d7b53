"""Watch the policy files and replace the engine.

After an invalid change, the last valid policies stay in force.

Unchanged files are not checked again. Large changes are checked in the background; small ones act
in the meantime.
"""
# interpreted: waits for files

from __future__ import annotations

import asyncio
import ctypes
import gc
import hashlib
import itertools
import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from watchfiles import awatch
from watchfiles.main import FileChange

from extproc.engine.engine import CompiledFile, Engine, compile_file
from extproc.engine.plan import Parts
from extproc.errors import BundleError, BundleErrors, excerpt
from extproc.logs import make_extra
from extproc.metrics import Metrics
from extproc.policy.files import find_directories, find_unread, read_all, read_each
from extproc.policy.last_good import Choice, FileRules, Found, KeptFile, Verdict, choose, judge
from extproc.policy.loader import PolicySet, Source, Unenforced, list_raw, locate_raw, parse
from extproc.policy.namespaces import Namespace, read_namespaces
from extproc.policy.overlaps import Overlap, find_overlaps
from extproc.policy.presets import DEFAULT_PRESET, find_preset
from extproc.settings import Settings

_LOG = logging.getLogger("loopguard")

_LINES_AT_ONCE = 100
"""Log lines written before other tasks get their turn."""

_SETTLE_MS = 100
"""Changes within this time of each other (an editor's save, a ConfigMap's swap) are one change."""

_TICK_MS = 500
_RECHECK_TICKS = 10
"""Ticks between comparisons without an event: some file systems send none, and policies expire.

The first comparison finds changes made while the watch was set up.
"""

_FREED_AT_ONCE = 1_000

AT_ONCE = 2**18
"""Maximum bytes of changed files that one reload checks, about 0.2 s.

The rest is checked in the background.
"""

_SPARE_PARTS = 1_000
"""Maximum number of unused parts that stay available for later policies."""

READ_SECONDS = 10.0
"""Timeout of file system calls; an unreachable network file system may never answer."""

_NAMES_SHOWN = 10

P = ParamSpec("P")
T = TypeVar("T")


def _now() -> datetime:
    return datetime.now(UTC)


class RefusedReload(NamedTuple):
    """Refused policy files: the time, the first errors as `validate` prints them, and their number.

    Attributes:
        sha256: hash of the refused file; empty if it could not be read.
    """

    at: datetime
    errors: list[str]
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not called
    sha256: str = ""


class Reloader:
    """The policies in force, and how they change.

    Attributes:
        sources: the files in force, without their policies, which take a hundred times as much
            memory.
    """

    engine: Engine
    sources: tuple[Source, ...]
    unenforced: tuple[Unenforced, ...]
    overlaps: tuple[Overlap, ...]
    _kept: dict[str, KeptFile]
    _shadowed: list[bool]
    _overridden: list[bool]

    def __init__(
        self, settings: Settings, metrics: Metrics, clock: Callable[[], datetime] = _now
    ) -> None:
        """Load the policies, by default the preset in shadow mode; raises BundleErrors."""
        self._settings = settings
        self._clock = clock
        self._paths = settings.policy or (find_preset(DEFAULT_PRESET),)
        self._rules = FileRules(
            read_namespaces(settings.namespace_of, self._paths), settings.allow_unenforced
        )
        self._metrics = metrics
        self._expired: Collection[str] = frozenset()
        self._lock = asyncio.Lock()
        self._files = _FileSystem()
        self._unreadable: dict[str, RefusedReload] = {}  # by path
        self._refused: dict[str, RefusedReload] = {}  # by file
        self._failure: RefusedReload | None = None  # of a whole reload
        self._waiting: list[
            dict[str, Found]
        ] = []  # unchecked changes, each a set of files that changed together
        self._checking: asyncio.Task[None] | None = None
        self._verdicts: dict[str, Verdict] = {}  # of files that are not in force
        self._compiled: dict[str, CompiledFile] = {}  # the valid ones among these
        self.overlaps = ()
        metrics.policy_reload_refused.set_function(lambda: bool(self.refusals))
        metrics.list_refused_files = lambda: [file for file in self.refusals if file]
        files, unreadable = read_all(self._paths)
        self._seen = {file: hashlib.sha256(data).hexdigest() for file, data in files.items()}
        loaded = _load(files, settings, self._clock(), unreadable, self._rules)
        self._apply(loaded)
        self._report_skipped(loaded.refused, unreadable)
        self._unread = find_unread(self._paths)
        for warning in [
            *self._unread,
            *loaded.warnings,
            *loaded.unenforced,
            *self._note_overlaps(loaded),
        ]:
            _LOG.warning(str(warning))

    def _report_skipped(
        self, refused: Mapping[str, list[BundleError]], unreadable: Sequence[BundleError]
    ) -> None:
        for file, errors in [*refused.items(), *((error.file, [error]) for error in unreadable)]:
            made = RefusedReload(
                self._clock(), excerpt(errors), len(errors), self._seen.get(file, "")
            )
            (self._refused if file in self._seen else self._unreadable)[file] = made
            for error in errors:
                _LOG.error(str(error))
            _LOG.error(
                "policies not loaded: no version of the file has been in force",
                extra=make_extra(file=file),
            )

    @property
    def refusals(self) -> dict[str, RefusedReload]:
        """Why content on disk is not in force, by file or path; by "" for a failed reload."""
        failure = {"": self._failure} if self._failure is not None else {}
        return {**self._unreadable, **self._refused, **failure}

    @property
    def refusal(self) -> RefusedReload | None:
        """All refusals in one, or None."""
        refusals = self.refusals.values()
        if not refusals:
            return None
        errors = [error for refusal in refusals for error in refusal.errors]
        return RefusedReload(
            max(refusal.at for refusal in refusals),
            excerpt(errors),
            sum(each.count for each in refusals),
        )

    def keeps(self, file: str) -> bool:
        """Whether an older version of the file, or of a file below this path, is in force."""
        return any(_is_below(known, file) for known in self._kept)

    def list_policies(self) -> list[tuple[Source, list[Any]]]:
        """Every file in force, with its raw policies."""
        sources, kept = self.sources, self._kept
        return [(source, list_raw(kept[source.file].open())) for source in sources]

    def locate_policies(self) -> dict[str, tuple[str, str, Any]]:
        """Every policy in force by id: its file, its JSON Pointer there, and the raw policy."""
        found = [(file, locate_raw(kept.open())) for file, kept in self._kept.items()]
        return {
            name: (file, pointer, raw)
            for file, own in found
            for name, (pointer, raw) in own.items()
        }

    async def reload(self, swap: Callable[[Engine], None], *, force: bool = False) -> None:
        """Read the files again; if they changed, or with `force`, load them and replace the engine.

        Never raises: errors are logged and counted, and the policies stay as they are.
        """
        async with self._lock:
            try:
                await self._follow_clock(swap)
                await self._follow_files(swap, force=force)
            except Exception as error:  # noqa: BLE001  # after any error, the last valid policies stay in force
                self._failure = await self._refuse([error])
        if self._waiting and (self._checking is None or self._checking.done()):
            self._checking = asyncio.create_task(self._check_waiting(swap))

    async def settle(self) -> None:
        """Wait until all changes that are checked in the background are in force or refused."""
        while self._checking is not None and not self._checking.done():
            await self._checking

    async def _check_waiting(self, swap: Callable[[Engine], None]) -> None:
        """Check changes one by one, the smallest first, and put each into force."""
        while self._waiting:
            change = min(self._waiting, key=_count_bytes)
            parts, now = self._share_parts(), self._clock()
            try:
                checked = await _run_aside(
                    lambda: _check_change(change, now, self._rules, parts, shadow=self._shadows)  # noqa: B023
                )
            except Exception as error:  # noqa: BLE001  # as in `reload`
                why = f"cannot be checked: {error!r}"
                checked = {
                    file: (Verdict(found.sha256, now, [BundleError(file, "", why)], None), None)
                    for file, found in change.items()
                }
            async with self._lock:
                if change in self._waiting:
                    self._waiting.remove(change)
                for file, (verdict, compiled) in checked.items():
                    self._verdicts[file] = verdict
                    if compiled is not None:
                        self._compiled[file] = compiled
                try:
                    await self._follow_files(swap, force=False, checked=True)
                except Exception as error:  # noqa: BLE001  # as in `reload`
                    self._failure = await self._refuse([error])

    @property
    def _shadows(self) -> bool:
        return self._settings.shadow or self._settings.watches

    def _share_parts(self) -> Parts:
        """The engine's parts, or none if most of them are unused."""
        parts = self.engine.parts
        return parts if len(parts) <= 4 * len(self.engine.plans) + _SPARE_PARTS else Parts()

    def _list_compiled(self, now: datetime) -> set[str]:
        """The files in force whose compiled policies are still valid.

        `global_shadow` ends by the clock.
        """
        shadowed = {
            source.file: self._shadows or source.forces_shadow(now) for source in self.sources
        }
        return {file for file, made in self.engine.files.items() if made.shadow == shadowed[file]}

    async def watch(self, swap: Callable[[Engine], None]) -> None:
        """Reload on every change, until cancelled."""
        failure = ""
        while True:
            await self.reload(swap)
            try:
                watched = await self._files.ask(_list_directories, self._paths, self._seen)
                async with aclosing(_watch_changes(watched)) as changes:
                    ticks = itertools.cycle(range(_RECHECK_TICKS))
                    async for changed in changes:
                        if next(ticks) and not changed:
                            continue
                        await self.reload(swap)
                        if watched != await self._files.ask(
                            _list_directories, self._paths, self._seen
                        ):
                            break
            except (
                OSError,
                RuntimeError,
            ) as error:  # a watched directory is gone, or the system has no watches left
                if str(error) != failure:
                    _LOG.warning(
                        "cannot watch the policy files, comparing them instead",
                        extra=make_extra(error=str(error)),
                    )
                failure = str(error)
                await asyncio.sleep(1)

    async def _follow_clock(self, swap: Callable[[Engine], None]) -> None:
        """Report policies that expire while they are in force."""
        now = self._clock()
        self._report_expiry(now)
        if _find_overridden(self.sources, now) != self._overridden:
            self._overridden = _find_overridden(self.sources, now)
            _LOG.warning("kill_switch_override expired, its kill switches act again")
        if _find_shadowed(self.sources, now) != self._shadowed:
            await self._swap(await asyncio.to_thread(self._compile_again, now), swap)
            _LOG.warning("global_shadow expired, its policies act again")

    async def _follow_files(
        self, swap: Callable[[Engine], None], *, force: bool, checked: bool = False
    ) -> None:
        """Apply the files' changes; `checked`: a background check has just ended."""
        found = await self._read()
        files, seen = self._match(found)
        await self._note_unreadable(found, force=force)
        if (
            (seen == self._seen and not checked)
            or not any(file.data is not None for file in files.values())
        ) and not force:
            self._seen = seen
            return
        if force and found and all(isinstance(content, BundleError) for content in found.values()):
            return
        self._seen = seen
        if force:  # check every file now
            self._waiting, self._verdicts, self._compiled = [], {}, {}
        waiting = self._set_aside(files) if not force else set()
        at_once = {
            file: Found(sha256=found.sha256) if file in waiting else found
            for file, found in files.items()
        }
        loaded = await asyncio.to_thread(self._choose, at_once, force=force)
        self._failure = None
        await self._note_refused(loaded.refused, waiting, force=force)
        self._verdicts.update(loaded.verdicts)
        acting = {file for file, kept in loaded.kept.items() if kept.sha256 == files[file].sha256}
        self._verdicts = {
            file: verdict for file, verdict in self._verdicts.items() if file not in acting
        }
        self._compiled = {
            file: made for file, made in self._compiled.items() if file in self._verdicts
        }
        if loaded.engine is None:
            return
        self._warn_about_versions(loaded.sources)
        changes = compare_policies(_list_digests(self.sources), _list_digests(loaded.sources))
        self._metrics.policy_reloads.labels(
            "ok"
        ).inc()  # in the same step in which they begin to act
        await self._swap(loaded, swap)
        await _log_all(
            logging.WARNING, [*loaded.warnings, *loaded.unenforced, *self._note_overlaps(loaded)]
        )
        _LOG.info(
            "policies reloaded",
            extra=make_extra(policies=len(self.engine.plans), files=len(self._kept), **changes),
        )

    async def _read(self) -> dict[str, Found | BundleError]:
        """Read each path on its own, so that a hanging file system delays no other path."""
        answers = await asyncio.gather(
            *(self._files.ask(_read, path) for path in self._paths), return_exceptions=True
        )
        found: dict[str, Found | BundleError] = {}
        known, self._unread = self._unread, []
        for path, answer in zip(self._paths, answers, strict=True):
            if isinstance(answer, TimeoutError):
                found[path] = BundleError(path, "", str(answer))
                self._unread += [warning for warning in known if _is_below(warning.file, path)]
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found.update(answer[0])
                self._unread += answer[1]
        await _log_all(
            logging.WARNING, [warning for warning in self._unread if warning not in known]
        )
        return found

    def _match(
        self, found: Mapping[str, Found | BundleError]
    ) -> tuple[dict[str, Found], dict[str, str]]:
        """The files to choose from, and their hashes; unreadable files count as unchanged."""
        files: dict[str, Found] = {}
        for name, content in found.items():
            if isinstance(content, BundleError):
                files.update(
                    {
                        file: Found(sha256=sha)
                        for file, sha in self._seen.items()
                        if _is_below(file, name)
                    }
                )
            else:
                files[name] = content
        return files, {file: content.sha256 for file, content in files.items()}

    def _set_aside(self, files: Mapping[str, Found]) -> set[str]:
        """The files whose changes are checked in the background.

        Files of one folder that change together are one change, because a policy may have moved
        between them.
        """
        self._verdicts = {
            file: verdict
            for file, verdict in self._verdicts.items()
            if file in files and files[file].sha256 == verdict.sha256
        }
        self._waiting = [
            change
            for change in self._waiting
            if all(files.get(file) == found for file, found in change.items())
        ]
        waiting = {file for change in self._waiting for file in change}
        changes: dict[str, dict[str, Found]] = {}
        for file, found in files.items():
            kept = self._kept.get(file)
            known = (
                file in waiting
                or file in self._verdicts
                or (kept is not None and kept.sha256 == found.sha256)
            )
            if found.data is not None and not known:
                # Paths stay as the user wrote them
                changes.setdefault(os.path.dirname(file), {})[file] = found  # noqa: PTH120
        left = AT_ONCE
        for change in sorted(changes.values(), key=_count_bytes):
            left -= _count_bytes(change)
            if left < 0:
                self._waiting.append(change)
                waiting.update(change)
                _LOG.info(
                    "checking a large change in the background",
                    extra=make_extra(files=_list_names(list(change))),
                )
        return waiting

    def _choose(self, files: Mapping[str, Found], *, force: bool) -> _Loaded:
        """Choose and compile, in a worker thread; the result has no engine if nothing changes."""
        now = self._clock()
        compiled = self._list_compiled(now) if not force else set()
        known = {
            file: verdict
            for file, verdict in self._verdicts.items()
            if self._is_still_valid(verdict, file, now)
        }
        with _Uncollected():
            choice = choose(
                files, self._kept, now, self._rules, afresh=force, known=known, compiled=compiled
            )
            waiting = {file for file, found in files.items() if found.data is None}
            before = {file: kept.sha256 for file, kept in self._kept.items()}
            mended = (
                self._refused.keys() - choice.refused.keys() - waiting or self._failure is not None
            )
            same = before == {file: kept.sha256 for file, kept in choice.kept.items()}
            if same and not mended and not (force and choice.kept.keys() - choice.refused.keys()):
                _free_all(choice.policies)
                return _Loaded(
                    (), (), (), None, self._kept, now, choice.refused, verdicts=choice.verdicts
                )
            return _compile(
                choice,
                now,
                self._find_compiled(choice, compiled),
                self._share_parts(),
                shadow=self._shadows,
            )

    def _is_still_valid(self, verdict: Verdict, file: str, now: datetime) -> bool:
        source = verdict.judged.source if verdict.judged is not None else None
        return source is None or self._compiled[file].shadow == (
            self._shadows or source.forces_shadow(now)
        )

    def _find_compiled(self, choice: Choice, compiled: Collection[str]) -> dict[str, CompiledFile]:
        found = {}
        for file, kept in choice.kept.items():
            verdict = self._verdicts.get(file)
            if file in compiled and kept is self._kept.get(file):
                found[file] = self.engine.files[file]
            elif verdict is not None and verdict.judged is kept.judged:
                found[file] = self._compiled[file]
        return found

    def _compile_again(self, now: datetime) -> _Loaded:
        """Compile the same policies again, in a thread; those that have expired stay in force."""
        compiled = self._list_compiled(now)
        with _Uncollected():
            choice = choose(
                dict.fromkeys(self._kept, Found()), self._kept, now, self._rules, compiled=compiled
            )
            return _compile(
                choice,
                now,
                self._find_compiled(choice, compiled),
                self._share_parts(),
                shadow=self._shadows,
            )

    async def _note_unreadable(
        self, found: Mapping[str, Found | BundleError], *, force: bool
    ) -> None:
        """Report unreadable paths; a file that stays missing is one failure in all."""
        before, self._unreadable = self._unreadable, {}
        for path, error in found.items():
            if isinstance(error, BundleError):
                known = before.get(path)
                new = known is None or known.errors != [str(error)] or force
                self._unreadable[path] = (
                    await self._refuse([error], path) if new or known is None else known
                )

    async def _note_refused(
        self, refused: Mapping[str, list[BundleError]], waiting: Collection[str], *, force: bool
    ) -> None:
        before = self._refused
        self._refused = {
            file: known for file, known in before.items() if file in refused or file in waiting
        }
        for file, errors in refused.items():
            known, sha256 = before.get(file), self._seen[file]
            if known is None or (known.sha256, known.errors) != (sha256, excerpt(errors)) or force:
                self._refused[file] = (await self._refuse(errors, file))._replace(sha256=sha256)

    async def _swap(self, loaded: _Loaded, swap: Callable[[Engine], None]) -> None:
        old = [self.engine]
        self._apply(loaded)
        swap(self.engine)
        await asyncio.to_thread(_dismantle, old)

    def _apply(self, loaded: _Loaded) -> None:
        if loaded.engine is None:
            return
        self.sources, self.engine, self._kept = loaded.sources, loaded.engine, loaded.kept
        self.unenforced = loaded.unenforced
        info = self._metrics.policy_info
        info.clear()
        for source in self.sources:
            version = "" if source.bundle_version is None else f"{source.bundle_version:.15g}"
            info.labels(version, source.sha256, source.file).set(1)
        self._metrics.enforce_percent.clear()
        for plan in self.engine.plans:
            if plan.ramp is not None:
                self._metrics.enforce_percent.labels(plan.id).set(plan.ramp.percent)
        self._shadowed = _find_shadowed(loaded.sources, loaded.now)
        self._overridden = _find_overridden(loaded.sources, loaded.now)
        self._report_expiry(loaded.now)

    async def _refuse(self, problems: Sequence[object], file: str = "") -> RefusedReload:
        """Count and log a refused file, or a failed reload if `file` is empty."""
        self._metrics.policy_reloads.labels("error").inc()
        made = RefusedReload(self._clock(), excerpt(problems), len(problems))
        await _log_all(logging.ERROR, problems)
        told = make_extra(errors=len(problems), **({"file": file} if file else {}))
        if not file or self.keeps(file):
            _LOG.error("policies not reloaded, the last good ones stay in force", extra=told)
        else:
            _LOG.error("policies not loaded: no version of the file has been in force", extra=told)
        return made

    def _note_overlaps(self, loaded: _Loaded) -> list[Overlap]:
        """Store the overlaps; returns the new ones."""
        known, self.overlaps = self.overlaps, loaded.overlaps
        return [overlap for overlap in self.overlaps if overlap not in known]

    def _warn_about_versions(self, sources: Iterable[Source]) -> None:
        before = {source.file: source.bundle_version for source in self.sources}
        for source in sources:
            old, new = before.get(source.file), source.bundle_version
            if old is not None and new is not None and new < old:
                _LOG.warning(
                    "bundle_version went down",
                    extra=make_extra(file=source.file, before=old, now=new),
                )

    def _report_expiry(self, now: datetime) -> None:
        expired = {
            source.file: at
            for source in self.sources
            if (at := source.expires_at) is not None and at <= now
        }
        for file in expired.keys() - set(self._expired):
            _LOG.error(
                "bundle expired, its policies keep acting",
                extra=make_extra(file=file, at=expired[file]),
            )
        self._expired = frozenset(expired)
        self._metrics.policy_expired.set(len(expired))


def _is_below(file: str, path: str) -> bool:
    # Paths stay as the user wrote them
    return file == path or file.startswith(os.path.join(path, ""))  # noqa: PTH118


async def _log_all(level: int, problems: Sequence[object]) -> None:
    """Log a line per problem, with pauses: ten thousand lines at once would delay every request."""
    for number, problem in enumerate(problems, 1):
        _LOG.log(level, str(problem))
        if not number % _LINES_AT_ONCE:
            await asyncio.sleep(0)


class _FileSystem:
    """Queries the file system in daemon threads, with a timeout.

    Unlike asyncio's worker threads, a daemon thread that never returns does not keep the process
    from exiting.
    """

    def __init__(self) -> None:
        self._asked: dict[object, Future[Any]] = {}

    async def ask(self, question: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `question`; raises TimeoutError after `READ_SECONDS`.

        A call that is still running is neither repeated nor waited for, so that stuck threads and
        delays do not pile up.
        """
        asked = (question, *[arg for arg in args if isinstance(arg, str)])
        answer, seconds = self._asked.get(asked), 0.0
        if answer is None or answer.done():
            answer, seconds = Future(), READ_SECONDS
            self._asked[asked] = answer
            work = partial(_settle, answer, partial(question, *args, **kwargs))
            threading.Thread(target=work, name="policy files", daemon=True).start()
        try:
            async with asyncio.timeout(seconds):
                found: T = await asyncio.shield(asyncio.wrap_future(answer))
        except TimeoutError:
            raise TimeoutError(f"could not be read within {READ_SECONDS:g} s") from None
        finally:
            if answer.done():  # free it: it may contain all files
                self._asked.pop(asked, None)
        return found


def _settle(answer: Future[T], work: Callable[[], T]) -> None:
    try:
        answer.set_result(work())
    except Exception as error:  # noqa: BLE001  # raised again when the answer is awaited
        answer.set_exception(error)


class _Loaded(NamedTuple):
    """Compiled policies, and the time they were compiled for; no engine if nothing changes."""

    sources: tuple[Source, ...]
    warnings: tuple[BundleError, ...]
    unenforced: tuple[Unenforced, ...]
    engine: Engine | None
    kept: dict[str, KeptFile]
    now: datetime
    refused: dict[str, list[BundleError]]
    overlaps: tuple[Overlap, ...] = ()
    verdicts: Mapping[str, Verdict] = MappingProxyType({})


def _read(path: str) -> tuple[dict[str, Found | BundleError], list[BundleError]]:
    """The files below a path, with hashes or errors, and warnings about files that are not read."""
    files = {
        name: content
        if isinstance(content, BundleError)
        else Found(content, hashlib.sha256(content).hexdigest())
        for name, content in read_each([path]).items()
    }
    return files, find_unread([path])


def build(  # noqa: PLR0913  # everything that decides the result
    files: Mapping[str, bytes],
    now: datetime,
    *,
    allow_unenforced: bool,
    shadow: bool = False,
    unreadable: Sequence[BundleError] = (),
    namespaces: Sequence[Namespace] = (),
) -> tuple[PolicySet, Engine]:
    """Make an engine from policy files; raises BundleErrors, starting with `unreadable`."""
    try:
        policies = parse(files, now, namespaces=namespaces)
        if not allow_unenforced:
            policies.require_enforced()
    except BundleErrors as error:
        raise BundleErrors([*unreadable, *error.errors]) from None
    if unreadable:
        raise BundleErrors(unreadable)
    return policies, Engine(policies, now, shadow=shadow)


def _load(
    files: Mapping[str, bytes],
    settings: Settings,
    now: datetime,
    unreadable: Sequence[BundleError],
    rules: FileRules,
) -> _Loaded:
    """Load at startup; raises BundleErrors, starting with `unreadable`."""
    found = {file: Found(data, hashlib.sha256(data).hexdigest()) for file, data in files.items()}
    with _Uncollected():
        choice = choose(found, {}, now, rules)
        if (choice.refused or unreadable) and not (settings.on_bad_file == "skip" and choice.kept):
            _free_all(choice.policies)
            allow = rules.allow_unenforced
            build(
                files,
                now,
                allow_unenforced=allow,
                unreadable=unreadable,
                namespaces=rules.namespaces,
            )
        return _compile(choice, now, {}, Parts(), shadow=settings.shadow or settings.watches)


def _compile(
    choice: Choice, now: datetime, known: Mapping[str, CompiledFile], parts: Parts, *, shadow: bool
) -> _Loaded:
    policies = choice.policies
    engine = Engine(policies, now, shadow=shadow, known=known, parts=parts)
    overlaps = tuple(find_overlaps(policies.sources))
    _free_all(policies)
    return _Loaded(
        policies.sources,
        policies.warnings,
        policies.unenforced,
        engine,
        choice.kept,
        now,
        choice.refused,
        overlaps,
        choice.verdicts,
    )


def _check_change(
    change: Mapping[str, Found], now: datetime, rules: FileRules, parts: Parts, *, shadow: bool
) -> dict[str, tuple[Verdict, CompiledFile | None]]:
    """Check files and compile those without errors, in a worker thread."""
    made: dict[str, tuple[Verdict, CompiledFile | None]] = {}
    with _Uncollected():
        for file, found in change.items():
            verdict = judge(file, found, now, rules)
            parsed, compiled = verdict.judged, None
            assert parsed is not None  # noqa: S101  # a new verdict has it
            source = parsed.source
            if source is not None and not verdict.errors:
                compiled = compile_file(source, parts, shadow=shadow or source.forces_shadow(now))
            else:
                verdict = verdict._replace(judged=None)
            made[file] = verdict, compiled
            for items in (
                parsed.entries,
                parsed.ids,
                *((source.policies, source.kill_switches) if source is not None else ()),
            ):
                _free(items)
    _trim()
    return made


def _count_bytes(change: Mapping[str, Found]) -> int:
    return sum(len(found.data or b"") for found in change.values())


async def _run_aside(work: Callable[[], T]) -> T:
    """Run in a daemon thread, which does not keep the process from exiting."""
    answer: Future[T] = Future()
    threading.Thread(target=_settle, args=(answer, work), name="policy files", daemon=True).start()
    return await asyncio.wrap_future(answer)


def _free_all(policies: PolicySet) -> None:
    for source in policies.sources:
        _free(source.policies)
        _free(source.kill_switches)
    _free(policies.scrap)
    _trim()


def _list_digests(sources: Iterable[Source]) -> dict[str, int]:
    return {policy.id: policy.digest for source in sources for policy in source.outlines}


def compare_policies(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, str | None]:
    """The effect of a reload: the ids `added`, `removed` and `changed`, or None for each.

    Compares digests by id.
    """
    found = {
        "added": [name for name in after if name not in before],
        "removed": [name for name in before if name not in after],
        "changed": [name for name, digest in after.items() if before.get(name, digest) != digest],
    }
    return {kind: _list_names(names) if names else None for kind, names in found.items()}


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{', '.join(names[:_NAMES_SHOWN])}{more}"


def _free(items: list[Any]) -> None:
    """Free many objects in steps, because freeing all at once would stall the event loop."""
    while items:
        del items[-_FREED_AT_ONCE:]


def _dismantle(engines: list[Engine]) -> None:
    """Free engines that are no longer used; the caller must hold no other reference to them."""
    parts = [part for engine in engines for part in engine.list_parts()]
    engines.clear()
    _free(parts)


def _trim() -> None:
    """Make the C library return free memory: glibc keeps all below the highest block in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Uncollected:
    """Exempts objects made in this context from garbage collection, which stalls the event loop.

    Policies have no reference cycles, so they are freed without the collector. Several threads may
    be inside.
    """

    _lock = threading.Lock()
    _builders = 0

    def __enter__(self) -> None:
        with self._lock:
            _Uncollected._builders += 1
            gc.disable()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            _Uncollected._builders -= 1
            gc.freeze()
            if not _Uncollected._builders:
                gc.enable()


def _find_shadowed(sources: Iterable[Source], now: datetime) -> list[bool]:
    return [source.forces_shadow(now) for source in sources]


def _find_overridden(sources: Iterable[Source], now: datetime) -> list[bool]:
    return [source.overrides_switches(now) for source in sources]


def _watch_changes(watched: Collection[str]) -> AsyncGenerator[set[FileChange], None]:
    """Yield once for each burst of changes, and an empty set for each tick without changes."""
    return awatch(
        *watched,
        watch_filter=None,
        recursive=False,
        debounce=4 * _SETTLE_MS,
        step=_SETTLE_MS,
        rust_timeout=_TICK_MS,
        yield_on_timeout=True,
    )


def _list_directories(paths: Iterable[str], files: Iterable[str]) -> set[str]:
    """The directories to watch, because a watch on a file is lost when the file is replaced.

    Subdirectories are not included: a policy file in `/` must not cause the whole disk to be
        watched.
    """
    found = {
        str(parent) for file in files if (parent := Path(os.path.realpath(file)).parent).is_dir()
    }
    for path in paths:
        if Path(path).is_dir():
            found.update(find_directories(path, lambda *_: None))
        else:  # the path is missing: its nearest existing ancestor
            found.add(next(str(above) for above in Path(path).absolute().parents if above.is_dir()))
    return found
