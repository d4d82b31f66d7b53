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
from extproc.policy.files import find_directories, read_files, read_what_can_be
from extproc.policy.loader import PolicySet, Source, Unenforced, list_raw, locate_raw, parse
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

_LEVEL = 1
"""zlib's level: similar policies shrink to a tenth, at 100 MB/s."""

_FREED_AT_ONCE = 1_000

_READ_SECONDS = 10.0
"""Time for a file system to answer, in seconds; a network file system that is gone may never do so."""

_NAMES_SHOWN = 10

P = ParamSpec("P")
T = TypeVar("T")


class RefusedReload(NamedTuple):
    """A refused reload: its time, its first errors as `loopguard validate` prints them, and their number."""

    at: datetime
    errors: list[str]
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not called


class Reloader:
    """The policies in force, and how they change.

    Attributes:
        sources: the files in force, without their policies, which take a hundred times as much room.
    """

    engine: Engine
    sources: tuple[Source, ...]
    unenforced: tuple[Unenforced, ...]
    _digests: dict[str, int]
    _archive: _Archive
    _shadowed: list[bool]
    _overridden: list[bool]

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        """Load for the first time: the preset in shadow mode if no policy is given. Raises BundleErrors if that fails."""
        self._settings = settings
        self._paths = settings.policy or (find_preset(DEFAULT_PRESET),)
        self._metrics = metrics
        self._expired: Collection[str] = frozenset()
        self._lock = asyncio.Lock()
        files, unreadable = read_what_can_be(self._paths)
        self._seen = _hash(files)
        self._files = _FileSystem()
        self._unreadable = ""
        self._refused = False
        self._refusal: RefusedReload | None = None
        metrics.policy_reload_refused.set_function(lambda: bool(self._refused or self._unreadable))
        loaded = _compile(files, settings, _now(), unreadable=unreadable)
        self._apply(loaded)
        for warning in [*loaded.warnings, *loaded.unenforced]:
            _LOG.warning(str(warning))

    @property
    def refusal(self) -> RefusedReload | None:
        """Why the files on disk are not in force; None if they are."""
        return self._refusal if self._refused or self._unreadable else None

    def list_policies(self) -> list[tuple[Source, list[Any]]]:
        """Every file in force, with its raw policies."""
        sources, archive = self.sources, self._archive
        return [(source, list_raw(data)) for source, data in zip(sources, archive.open().values(), strict=True)]

    def locate_policies(self) -> dict[str, tuple[str, str, Any]]:
        """Every policy in force, by its id: its file, its JSON Pointer there, and the raw policy."""
        found = [(file, locate_raw(data)) for file, data in self._archive.open().items()]
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
                await self._refuse(error)

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
            loaded = await asyncio.to_thread(self._archive.compile, self._settings, now)
            await self._swap(loaded, swap)
            _LOG.warning("global_shadow expired, its policies act again")

    async def _follow_files(self, swap: Callable[[Engine], None], *, force: bool) -> None:
        try:
            files, seen = await self._files.ask(_read, self._paths)
        except (BundleErrors, OSError) as error:
            if str(error) != self._unreadable or force:  # a file that stays missing is one failure, not one per recheck
                await self._refuse(error)
            self._unreadable = str(error)
            return
        self._unreadable = ""
        if seen == self._seen and not force:
            return
        self._seen = seen
        self._refused = True  # until the policies are replaced
        loaded = await asyncio.to_thread(_compile, files, self._settings, _now())
        self._warn_about_versions(loaded.sources)
        self._refused = False
        changes = compare_policies(self._digests, loaded.digests)
        self._metrics.policy_reloads.labels("ok").inc()  # in the same step in which they begin to act
        await self._swap(loaded, swap)
        await _log_all(logging.WARNING, [*loaded.warnings, *loaded.unenforced])
        _LOG.info("policies reloaded", extra=make_extra(policies=len(self.engine.plans), files=len(files), **changes))

    async def _swap(self, loaded: _Loaded, swap: Callable[[Engine], None]) -> None:
        """Put new policies into force, and free the old ones."""
        old = [self.engine]
        self._apply(loaded)
        swap(self.engine)
        await asyncio.to_thread(_dismantle, old)

    def _apply(self, loaded: _Loaded) -> None:
        self.sources, self.engine, self._archive = loaded.sources, loaded.engine, loaded.archive
        self._digests, self.unenforced = loaded.digests, loaded.unenforced
        info = self._metrics.policy_info
        info.clear()
        for source in self.sources:
            version = "" if source.bundle_version is None else f"{source.bundle_version:.15g}"
            info.labels(version, source.sha256).set(1)
        self._metrics.enforce_percent.clear()
        for plan in self.engine.plans:
            if plan.ramp is not None:
                self._metrics.enforce_percent.labels(plan.id).set(plan.ramp.percent)
        self._shadowed = _find_shadowed(loaded.sources, loaded.now)
        self._overridden = _find_overridden(loaded.sources, loaded.now)
        self._report_expiry(loaded.now)

    async def _refuse(self, error: Exception) -> None:
        self._metrics.policy_reloads.labels("error").inc()
        problems: Sequence[object] = error.errors if isinstance(error, BundleErrors) else [error]
        self._refusal = RefusedReload(_now(), excerpt(problems), len(problems))
        await _log_all(logging.ERROR, problems)
        _LOG.error("policies not reloaded, the last good ones stay in force", extra=make_extra(errors=len(problems)))

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

        If the same question is still being answered, that answer is used, so that stuck threads do not pile up.
        """
        answer = self._asked.get(question)
        if answer is None or answer.done():
            answer = self._asked[question] = Future()
            work = partial(_settle, answer, partial(question, *args, **kwargs))
            threading.Thread(target=work, name="policy files", daemon=True).start()
        try:
            async with asyncio.timeout(_READ_SECONDS):
                found: T = await asyncio.shield(asyncio.wrap_future(answer))
        except TimeoutError:
            raise TimeoutError(f"the policy files could not be read within {_READ_SECONDS:g} s") from None
        finally:
            if answer.done():  # not kept: it may contain all files
                self._asked.pop(question, None)
        return found


def _settle(answer: Future[T], work: Callable[[], T]) -> None:
    try:
        answer.set_result(work())
    except Exception as error:  # noqa: BLE001  # raised again when the answer is awaited
        answer.set_exception(error)


class _Archive(NamedTuple):
    """The policy files in force, compressed, and the time at which they were checked."""

    files: dict[str, bytes]
    now: datetime

    def open(self) -> dict[str, bytes]:
        """Decompress the files."""
        return {file: zlib.decompress(data) for file, data in self.files.items()}

    def compile(self, settings: Settings, now: datetime) -> _Loaded:
        """Compile the same policies again; those that have expired since then keep acting. Runs in a worker thread."""
        return _compile(self.open(), settings, now, checked=self.now)


class _Loaded(NamedTuple):
    """Compiled policies, and the time for which they were compiled."""

    sources: tuple[Source, ...]
    warnings: tuple[BundleError, ...]
    unenforced: tuple[Unenforced, ...]
    engine: Engine
    archive: _Archive
    now: datetime
    digests: dict[str, int]


def _read(paths: Iterable[str]) -> tuple[dict[str, bytes], dict[str, str]]:
    """The files below `paths`, and a hash of each."""
    files = read_files(paths)
    return files, _hash(files)


def _hash(files: Mapping[str, bytes]) -> dict[str, str]:
    return {file: hashlib.sha256(data).hexdigest() for file, data in files.items()}


def build(  # noqa: PLR0913  # everything that decides the result
    files: Mapping[str, bytes],
    now: datetime,
    *,
    allow_unenforced: bool,
    shadow: bool = False,
    checked: datetime | None = None,
    unreadable: Sequence[BundleError] = (),
) -> tuple[PolicySet, Engine]:
    """Make an engine from policy files, for `serve`, and for `validate` as a test.

    Policies are expired as of `checked`, or else as of `now`. Raises BundleErrors, starting with `unreadable`.
    """
    try:
        policies = parse(files, checked or now)
        if not allow_unenforced:
            policies.require_enforced()
    except BundleErrors as error:
        raise BundleErrors([*unreadable, *error.errors]) from None
    if unreadable:
        raise BundleErrors(unreadable)
    return policies, Engine(policies, now, shadow=shadow)


def _compile(
    files: dict[str, bytes],
    settings: Settings,
    now: datetime,
    checked: datetime | None = None,
    unreadable: Sequence[BundleError] = (),
) -> _Loaded:
    """See `build`; also frees objects that are no longer needed. Runs in a worker thread during a reload."""
    archive = _Archive({file: zlib.compress(data, _LEVEL) for file, data in files.items()}, checked or now)
    with _uncollected():
        policies, engine = build(
            files,
            now,
            allow_unenforced=settings.allow_unenforced,
            shadow=settings.shadow or settings.watches,
            checked=checked,
            unreadable=unreadable,
        )
        # A decoded text keeps all the memory around it allocated, so texts that outlive the file are copied.
        digests = {copy_text(policy.id): _digest(policy) for source in policies.sources for policy in source.policies}
        for source in policies.sources:
            _free(source.policies)
            _free(source.kill_switches)
        _free(policies.scrap)
    _trim()
    return _Loaded(policies.sources, policies.warnings, policies.unenforced, engine, archive, now, digests)


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
            found.update(find_directories(path))
        else:  # of a missing path, the nearest existing directory above
            found.add(next(str(above) for above in Path(path).absolute().parents if above.is_dir()))
    return found
