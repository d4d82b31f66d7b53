"""Watch the policy files and swap the engine; a bad change keeps the last good one."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from watchfiles import awatch

from extproc.engine import Engine
from extproc.errors import BundleErrors, LoopguardError
from extproc.logs import fields
from extproc.metrics import Metrics
from extproc.policy.loader import PolicySet, parse, read_files
from extproc.settings import Settings

_LOG = logging.getLogger("loopguard")

_SETTLE_MS = 100
"""Changes that follow each other this fast (an editor's save, a ConfigMap's swap) are one change."""

_RECHECK_SECONDS = 5
"""How often the files are compared without any event: some file systems send none, and overrides expire by the clock."""


class Reloader:
    """The policies in force, and how they change.

    Attributes:
        engine: compiled from `policies`.
        policies: what was loaded last without an error.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        """Load for the first time.

        Raises:
            BundleErrors: the policies have errors.
            LoopguardError: parts of a bundle are not enforced, and nobody allowed that.
        """
        self._settings = settings
        self._metrics = metrics
        self._expired: set[str] = set()
        self._lock = asyncio.Lock()
        self._seen = read_files(settings.policy)
        self._refused = ""
        self._take(*_compile(self._seen, settings))

    async def reload(self, swap: Callable[[Engine], None], *, force: bool = False) -> None:
        """Read the files again; when they changed, or `force` says so, load them and swap.

        Nothing is raised: errors are logged, counted, and leave everything as it was.
        """
        async with self._lock:
            if self._shadows() != self._shadowed:  # a global_shadow has expired
                self._take(self.policies, Engine(self.policies, _now(), shadow=self._settings.shadow))
                swap(self.engine)
            try:
                files = await asyncio.to_thread(read_files, self._settings.policy)
                if files == self._seen and not force:
                    return
                self._seen = files
                policies, engine = await asyncio.to_thread(_compile, files, self._settings)
            except LoopguardError as error:
                self._refuse(error, force=force)
                return
            self._refused = ""
            self._warn_about_versions(policies)
            self._take(policies, engine)
            swap(engine)
            self._metrics.policy_reloads.labels("ok").inc()
            _LOG.info("policies reloaded", extra=fields(policies=len(engine.plans), files=len(policies.sources)))

    async def watch(self, swap: Callable[[Engine], None]) -> None:
        """Reload on every change, until cancelled."""
        while True:
            try:
                async for _ in awatch(
                    *_directories(self._settings.policy),
                    debounce=4 * _SETTLE_MS,
                    step=_SETTLE_MS,
                    rust_timeout=_RECHECK_SECONDS * 1000,
                    yield_on_timeout=True,
                ):
                    await self.reload(swap)
                    self._report_expiry()
            except (OSError, RuntimeError) as error:  # a watched directory went away
                _LOG.warning("cannot watch the policy files, comparing them instead", extra=fields(error=str(error)))
            await asyncio.sleep(1)
            await self.reload(swap)

    def _take(self, policies: PolicySet, engine: Engine) -> None:
        self.policies = policies
        self.engine = engine
        for warning in (*policies.warnings, *policies.unenforced):
            _LOG.warning(str(warning))
        info = self._metrics.policy_info
        info.clear()
        for source in policies.sources:
            version = "" if source.bundle_version is None else f"{source.bundle_version:g}"
            info.labels(version, source.sha256).set(1)
        self._shadowed = self._shadows()
        self._report_expiry()

    def _shadows(self) -> list[bool]:
        now = _now()
        return [source.shadowed(now) for source in self.policies.sources]

    def _refuse(self, error: LoopguardError, *, force: bool) -> None:
        if str(error) == self._refused and not force:  # a file that stays missing is one failure, not one every recheck
            return
        self._refused = str(error)
        self._metrics.policy_reloads.labels("error").inc()
        problems: Sequence[object] = error.errors if isinstance(error, BundleErrors) else [error]
        for problem in problems:
            _LOG.error(str(problem))
        _LOG.error("policies not reloaded, the last good ones stay in force", extra=fields(errors=len(problems)))

    def _warn_about_versions(self, policies: PolicySet) -> None:
        before = {source.file: source.bundle_version for source in self.policies.sources}
        for source in policies.sources:
            old, new = before.get(source.file), source.bundle_version
            if old is not None and new is not None and new < old:
                _LOG.warning("bundle_version went down", extra=fields(file=source.file, before=old, now=new))

    def _report_expiry(self) -> None:
        now = _now()
        for source in self.policies.sources:
            expired = source.expires_at is not None and source.expires_at <= now
            if expired and source.file not in self._expired:
                self._expired.add(source.file)
                _LOG.error("bundle expired, its policies keep acting", extra=fields(file=source.file, at=source.expires_at))
            elif not expired:
                self._expired.discard(source.file)
        self._metrics.policy_expired.set(len(self._expired))


def _now() -> datetime:
    return datetime.now(UTC)


def _compile(files: dict[str, bytes], settings: Settings) -> tuple[PolicySet, Engine]:
    """Runs in a worker thread during a reload."""
    now = _now()
    policies = parse(files, now)
    if policies.unenforced and not settings.allow_unenforced:
        raise BundleErrors(policies.unenforced)
    return policies, Engine(policies, now, shadow=settings.shadow)


def _directories(paths: Sequence[str]) -> list[str]:
    """What to watch: directories, because a file that is replaced takes its watch with it."""
    found = set()
    for path in paths:
        for place in (Path(path), Path(os.path.realpath(path))):
            found.add(str(place if place.is_dir() else place.parent))
    return sorted(found)
