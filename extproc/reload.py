"""Watches the policy files and replaces the engine. After an invalid change, the last valid policies stay in force."""
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
import zlib
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from watchfiles import awatch
from watchfiles.main import FileChange

from extproc.engine.engine import Engine
from extproc.errors import BundleError, BundleErrors, excerpt
from extproc.logs import make_extra
from extproc.metrics import Metrics
from extproc.objects import copy_text
from extproc.policy.bundle import Policy
from extproc.policy.files import find_directories, read_each, read_what_can_be
from extproc.policy.last_good import Choice, Found, KeptFile, choose
from extproc.policy.loader import PolicySet, Source, Unenforced, list_raw, locate_raw, parse
from extproc.policy.namespaces import Namespace, read_namespaces
from extproc.policy.overlaps import Overlap, find_overlaps
from extproc.policy.presets import DEFAULT_PRESET, find_preset
from extproc.settings import Settings

_LOG = logging.getLogger("loopguard")

_LINES_AT_ONCE = 100
"""Log lines written before other tasks get their turn."""

_SETTLE_MS = 100
"""Changes that follow each other within this time (an editor's save, a ConfigMap's swap) are one change."""

_TICK_MS = 500
_RECHECK_TICKS = 10
"""Ticks between comparisons of the files without an event: some file systems send none, and policies expire by the clock.

The first comparison finds changes made while the watch was being set up.
"""

_FREED_AT_ONCE = 1_000

_READ_SECONDS = 10.0
"""Time for a file system to answer, in seconds; a network file system that is gone may never do so."""

_NAMES_SHOWN = 10

P = ParamSpec("P")
T = TypeVar("T")


class RefusedReload(NamedTuple):
    """Policy files that are refused: the time, their first errors as `loopguard validate` prints them, and their number.

    Attributes:
        sha256: of the file that was refused; empty if it could not be read.
    """

    at: datetime
    errors: list[str]
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not called
    sha256: str = ""


class Reloader:
    """The policies in force, and how they change.

    Attributes:
        sources: the files in force, without their policies, which take a hundred times as much room.
    """

    engine: Engine
    sources: tuple[Source, ...]
    unenforced: tuple[Unenforced, ...]
    overlaps: tuple[Overlap, ...]
    _digests: dict[str, int]
    _kept: dict[str, KeptFile]
    _shadowed: list[bool]
    _overridden: list[bool]

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        """Load for the first time: the preset in shadow mode if no policy is given. Raises BundleErrors if that fails."""
        self._settings = settings
        self._paths = settings.policy or (find_preset(DEFAULT_PRESET),)
        self._namespaces = read_namespaces(settings.namespace_of, self._paths)
        self._metrics = metrics
        self._expired: Collection[str] = frozenset()
        self._lock = asyncio.Lock()
        self._files = _FileSystem()
        self._unreadable: dict[str, RefusedReload] = {}  # by path
        self._refused: dict[str, RefusedReload] = {}  # by file
        self._failure: RefusedReload | None = None  # of a whole reload
        self.overlaps = ()
        metrics.policy_reload_refused.set_function(lambda: bool(self.refusals))
        metrics.list_refused_files = lambda: [file for file in self.refusals if file]
        files, unreadable = read_what_can_be(self._paths)
        self._seen = {file: hashlib.sha256(data).hexdigest() for file, data in files.items()}
        loaded = _load(files, settings, _now(), unreadable, self._namespaces)
        self._apply(loaded)
        for warning in [*loaded.warnings, *loaded.unenforced, *self._note_overlaps(loaded)]:
            _LOG.warning(str(warning))

    @property
    def refusals(self) -> dict[str, RefusedReload]:
        """Why files on disk are not in force, by file, or by a path below which nothing can be read; empty for neither."""
        failure = {"": self._failure} if self._failure is not None else {}
        return {**self._unreadable, **self._refused, **failure}

    @property
    def refusal(self) -> RefusedReload | None:
        """All refusals as one; None for none."""
        refusals = self.refusals.values()
        if not refusals:
            return None
        errors = [error for refusal in refusals for error in refusal.errors]
        return RefusedReload(max(refusal.at for refusal in refusals), excerpt(errors), sum(each.count for each in refusals))

    def keeps(self, file: str) -> bool:
        """Whether an older version of the file, or of one below it, is in force."""
        return any(_is_below(known, file) for known in self._kept)

    def list_policies(self) -> list[tuple[Source, list[Any]]]:
        """Every file in force, with its raw policies."""
        sources, kept = self.sources, self._kept
        return [(source, list_raw(kept[source.file].open())) for source in sources]

    def locate_policies(self) -> dict[str, tuple[str, str, Any]]:
        """Every policy in force, by its id: its file, its JSON Pointer there, and the raw policy."""
        found = [(file, locate_raw(kept.open())) for file, kept in self._kept.items()]
        return {name: (file, pointer, raw) for file, own in found for name, (pointer, raw) in own.items()}

    async def reload(self, swap: Callable[[Engine], None], *, force: bool = False) -> None:
        """Read the files again. If they changed, or with `force`, load them and replace the engine.

        Never raises: errors are logged and counted, and change nothing.
        """
        async with self._lock:
            try:
                await self._follow_clock(swap)
                await self._follow_files(swap, force=force)
            except Exception as error:  # noqa: BLE001  # after any error, the last valid policies stay in force
                self._failure = await self._refuse([error])

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
                        if watched != await self._files.ask(_list_directories, self._paths, self._seen):
                            break
            except (OSError, RuntimeError) as error:  # a watched directory is gone, or the system's watches are used up
                if str(error) != failure:
                    _LOG.warning("cannot watch the policy files, comparing them instead", extra=make_extra(error=str(error)))
                failure = str(error)
                await asyncio.sleep(1)

    async def _follow_clock(self, swap: Callable[[Engine], None]) -> None:
        """Report policies that expire while they are in force."""
        now = _now()
        self._report_expiry(now)
        if _find_overridden(self.sources, now) != self._overridden:
            self._overridden = _find_overridden(self.sources, now)
            _LOG.warning("kill_switch_override expired, its kill switches act again")
        if _find_shadowed(self.sources, now) != self._shadowed:
            loaded = await asyncio.to_thread(_compile_again, self._kept, self._settings, now, self._namespaces)
            await self._swap(loaded, swap)
            _LOG.warning("global_shadow expired, its policies act again")

    async def _follow_files(self, swap: Callable[[Engine], None], *, force: bool) -> None:
        found = await self._read()
        files, seen = self._match(found)
        await self._note_unreadable(found, force=force)
        if (seen == self._seen or not any(file.data is not None for file in files.values())) and not force:
            self._seen = seen
            return
        if force and found and all(isinstance(content, BundleError) for content in found.values()):
            return
        self._seen = seen
        loaded = await asyncio.to_thread(self._choose, files, force=force)
        self._failure = None
        await self._note_refused(loaded.refused, force=force)
        if loaded.engine is None:
            return
        self._warn_about_versions(loaded.sources)
        changes = compare_policies(self._digests, loaded.digests)
        self._metrics.policy_reloads.labels("ok").inc()  # in the same step in which they begin to act
        await self._swap(loaded, swap)
        await _log_all(logging.WARNING, [*loaded.warnings, *loaded.unenforced, *self._note_overlaps(loaded)])
        _LOG.info("policies reloaded", extra=make_extra(policies=len(self.engine.plans), files=len(self._kept), **changes))

    async def _read(self) -> dict[str, Found | BundleError]:
        """Read every path on its own, so that one whose file system does not answer delays no other."""
        answers = await asyncio.gather(*(self._files.ask(_read, path) for path in self._paths), return_exceptions=True)
        found: dict[str, Found | BundleError] = {}
        for path, answer in zip(self._paths, answers, strict=True):
            if isinstance(answer, TimeoutError):
                found[path] = BundleError(path, "", str(answer))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found.update(answer)
        return found

    def _match(self, found: Mapping[str, Found | BundleError]) -> tuple[dict[str, Found], dict[str, str]]:
        """The files to choose from, and their hashes: those that cannot be read now are as they were."""
        files: dict[str, Found] = {}
        for name, content in found.items():
            if isinstance(content, BundleError):
                files.update({file: Found(sha256=sha) for file, sha in self._seen.items() if _is_below(file, name)})
            else:
                files[name] = content
        return files, {file: content.sha256 for file, content in files.items()}

    def _choose(self, files: Mapping[str, Found], *, force: bool) -> _Loaded:
        """Choose and compile; without an engine if nothing changes. Runs in a worker thread."""
        settings, now = self._settings, _now()
        with _uncollected():
            choice = choose(
                files,
                self._kept,
                now,
                allow_unenforced=settings.allow_unenforced,
                namespaces=self._namespaces,
                afresh=force,
            )
            before = {file: kept.sha256 for file, kept in self._kept.items()}
            mended = self._refused.keys() - choice.refused.keys() or self._failure is not None
            same = before == {file: kept.sha256 for file, kept in choice.kept.items()}
            if same and not mended and not (force and choice.kept.keys() - choice.refused.keys()):
                _free_all(choice.policies)
                return _Loaded((), (), (), None, self._kept, now, {}, choice.refused)
            return _compile(choice, settings, now)

    async def _note_unreadable(self, found: Mapping[str, Found | BundleError], *, force: bool) -> None:
        """Report what cannot be read; a file that stays missing is one failure, not one per recheck."""
        before, self._unreadable = self._unreadable, {}
        for path, error in found.items():
            if isinstance(error, BundleError):
                known = before.get(path)
                new = known is None or known.errors != [str(error)] or force
                self._unreadable[path] = await self._refuse([error], path) if new or known is None else known

    async def _note_refused(self, refused: Mapping[str, list[BundleError]], *, force: bool) -> None:
        before = self._refused
        self._refused = {file: known for file, known in before.items() if file in refused}
        for file, errors in refused.items():
            known, sha256 = before.get(file), self._seen[file]
            if known is None or (known.sha256, known.errors) != (sha256, excerpt(errors)) or force:
                self._refused[file] = (await self._refuse(errors, file))._replace(sha256=sha256)

    async def _swap(self, loaded: _Loaded, swap: Callable[[Engine], None]) -> None:
        """Put new policies into force, and free the old ones."""
        old = [self.engine]
        self._apply(loaded)
        swap(self.engine)
        await asyncio.to_thread(_dismantle, old)

    def _apply(self, loaded: _Loaded) -> None:
        if loaded.engine is None:
            return
        self.sources, self.engine, self._kept = loaded.sources, loaded.engine, loaded.kept
        self._digests, self.unenforced = loaded.digests, loaded.unenforced
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
        """Count and log a refused file, or without one a failed reload."""
        self._metrics.policy_reloads.labels("error").inc()
        made = RefusedReload(_now(), excerpt(problems), len(problems))
        await _log_all(logging.ERROR, problems)
        told = make_extra(errors=len(problems), **({"file": file} if file else {}))
        if not file or self.keeps(file):
            _LOG.error("policies not reloaded, the last good ones stay in force", extra=told)
        else:
            _LOG.error("policies not loaded: no version of the file has been in force", extra=told)
        return made

    def _note_overlaps(self, loaded: _Loaded) -> list[Overlap]:
        """Those that were not there before."""
        known, self.overlaps = self.overlaps, loaded.overlaps
        return [overlap for overlap in self.overlaps if overlap not in known]

    def _warn_about_versions(self, sources: Iterable[Source]) -> None:
        before = {source.file: source.bundle_version for source in self.sources}
        for source in sources:
            old, new = before.get(source.file), source.bundle_version
            if old is not None and new is not None and new < old:
                _LOG.warning("bundle_version went down", extra=make_extra(file=source.file, before=old, now=new))

    def _report_expiry(self, now: datetime) -> None:
        expired = {source.file: at for source in self.sources if (at := source.expires_at) is not None and at <= now}
        for file in expired.keys() - set(self._expired):
            _LOG.error("bundle expired, its policies keep acting", extra=make_extra(file=file, at=expired[file]))
        self._expired = frozenset(expired)
        self._metrics.policy_expired.set(len(expired))


def _is_below(file: str, path: str) -> bool:
    """Whether a file that was found below a policy path is that path, or below it."""
    return file == path or file.startswith(os.path.join(path, ""))  # noqa: PTH118  # paths stay as the user wrote them


async def _log_all(level: int, problems: Sequence[object]) -> None:
    """Log a line for each problem, with pauses: ten thousand lines at once would delay every request."""
    for number, problem in enumerate(problems, 1):
        _LOG.log(level, str(problem))
        if not number % _LINES_AT_ONCE:
            await asyncio.sleep(0)


def _now() -> datetime:
    return datetime.now(UTC)


class _FileSystem:
    """Queries the file system in threads of its own, with a time limit.

    They are daemon threads, so unlike asyncio's own, one that never returns does not keep the process from ending.
    """

    def __init__(self) -> None:
        self._asked: dict[object, Future[Any]] = {}

    async def ask(self, question: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Answer a question; raises TimeoutError if that takes too long.

        A question that is still being answered is not asked again and not waited for, so that neither stuck threads nor delays
        pile up.
        """
        asked = (question, *[arg for arg in args if isinstance(arg, str)])
        answer, seconds = self._asked.get(asked), 0.0
        if answer is None or answer.done():
            answer, seconds = Future(), _READ_SECONDS
            self._asked[asked] = answer
            work = partial(_settle, answer, partial(question, *args, **kwargs))
            threading.Thread(target=work, name="policy files", daemon=True).start()
        try:
            async with asyncio.timeout(seconds):
                found: T = await asyncio.shield(asyncio.wrap_future(answer))
        except TimeoutError:
            raise TimeoutError(f"could not be read within {_READ_SECONDS:g} s") from None
        finally:
            if answer.done():  # not kept: it may contain all files
                self._asked.pop(asked, None)
        return found


def _settle(answer: Future[T], work: Callable[[], T]) -> None:
    try:
        answer.set_result(work())
    except Exception as error:  # noqa: BLE001  # raised again when the answer is awaited
        answer.set_exception(error)


class _Loaded(NamedTuple):
    """Compiled policies, and the time for which they were compiled; no engine if nothing changes."""

    sources: tuple[Source, ...]
    warnings: tuple[BundleError, ...]
    unenforced: tuple[Unenforced, ...]
    engine: Engine | None
    kept: dict[str, KeptFile]
    now: datetime
    digests: dict[str, int]
    refused: dict[str, list[BundleError]]
    overlaps: tuple[Overlap, ...] = ()


def _read(path: str) -> dict[str, Found | BundleError]:
    """The files below a path, and the hash of each, or errors in their place."""
    return {
        name: content if isinstance(content, BundleError) else Found(content, hashlib.sha256(content).hexdigest())
        for name, content in read_each([path]).items()
    }


def build(  # noqa: PLR0913  # everything that decides the result
    files: Mapping[str, bytes],
    now: datetime,
    *,
    allow_unenforced: bool,
    shadow: bool = False,
    unreadable: Sequence[BundleError] = (),
    namespaces: Sequence[Namespace] = (),
) -> tuple[PolicySet, Engine]:
    """Make an engine from policy files, for `serve`, and for `validate` as a test.

    Raises BundleErrors, starting with `unreadable`.
    """
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
    namespaces: Sequence[Namespace],
) -> _Loaded:
    """Load for the first time; raises BundleErrors with all errors, starting with `unreadable`."""
    found = {file: Found(data, hashlib.sha256(data).hexdigest()) for file, data in files.items()}
    allow = settings.allow_unenforced
    with _uncollected():
        choice = choose(found, {}, now, allow_unenforced=allow, namespaces=namespaces)
        if choice.refused or unreadable:
            _free_all(choice.policies)
            build(files, now, allow_unenforced=allow, unreadable=unreadable, namespaces=namespaces)
        return _compile(choice, settings, now)


def _compile_again(kept: Mapping[str, KeptFile], settings: Settings, now: datetime, namespaces: Sequence[Namespace]) -> _Loaded:
    """Compile the same policies again; those that have expired since then keep acting. Runs in a worker thread."""
    allow = settings.allow_unenforced
    with _uncollected():
        choice = choose(dict.fromkeys(kept, Found()), kept, now, allow_unenforced=allow, namespaces=namespaces)
        return _compile(choice, settings, now)


def _compile(choice: Choice, settings: Settings, now: datetime) -> _Loaded:
    """Make the engine, and free objects that are no longer needed."""
    policies = choice.policies
    engine = Engine(policies, now, shadow=settings.shadow or settings.watches)
    # A decoded text keeps all the memory around it allocated, so texts that outlive the file are copied.
    digests = {copy_text(policy.id): _digest(policy) for source in policies.sources for policy in source.policies}
    overlaps = tuple(find_overlaps(policies.sources))
    _free_all(policies)
    return _Loaded(
        policies.sources, policies.warnings, policies.unenforced, engine, choice.kept, now, digests, choice.refused, overlaps
    )


def _free_all(policies: PolicySet) -> None:
    for source in policies.sources:
        _free(source.policies)
        _free(source.kill_switches)
    _free(policies.scrap)
    _trim()


def _digest(policy: Policy) -> int:
    return zlib.crc32(policy.model_dump_json(exclude_defaults=True).encode())


def compare_policies(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, str | None]:
    """The effect of a reload, by digests of policies: ids that it `added`, `removed` and `changed`; None for no change."""
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
    """Free many objects step by step: freeing them at once would hold the interpreter lock, and stall the event loop."""
    while items:
        del items[-_FREED_AT_ONCE:]


def _dismantle(engines: list[Engine]) -> None:
    """Free engines that are no longer used; the caller must hold no other reference to them."""
    parts = [part for engine in engines for part in engine.list_parts()]
    engines.clear()
    _free(parts)


def _trim() -> None:
    """Make the C library return free memory. On its own, glibc keeps what is below the last block in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Exempt everything built here from garbage collection, which would stop the event loop while it visits these objects.

    Policies have no reference cycles, so dropped ones are freed without the collector.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
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
    """The directories to watch: a watch on a file is lost when the file is replaced.

    They are watched without their subdirectories: a policy file in `/` must not cause the whole disk to be watched.
    """
    found = {str(parent) for file in files if (parent := Path(os.path.realpath(file)).parent).is_dir()}
    for path in paths:
        if Path(path).is_dir():
            found.update(find_directories(path, lambda *_: None))
        else:  # of a missing path, the nearest existing directory above
            found.add(next(str(above) for above in Path(path).absolute().parents if above.is_dir()))
    return found
