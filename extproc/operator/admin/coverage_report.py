"""`/coverage`: the guarded share of traffic, and what to change for the rest, as JSON or HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from math import floor
from time import time
from typing import Any, NamedTuple, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from extproc.budgets.guard import BUDGET
from extproc.build import BUILD
from extproc.decision import MISSING
from extproc.engine.ramp import tell_share
from extproc.memory import read_memory
from extproc.operator.admin.coverage_repairs import REPAIRS, UNKNOWN, UNPAID, UNSTEERED
from extproc.operator.admin.html import prefers_html, send_html
from extproc.operator.admin.pages import Page, send_page
from extproc.operator.admin.reports import describe_view, write_time
from extproc.operator.admin.row_states import count
from extproc.operator.board import Board, View
from extproc.operator.coverage import BY_DESIGN
from extproc.operator.coverage_rows import (
    ABSURD,
    COUNTED,
    DROPPED,
    ENFORCES_ON_NONE,
    EVICTED,
    EXEMPT,
    PARTLY,
    REQUESTS,
    UNGUARDED,
    UNLOGGED,
    UNMATCHED,
    UNMATCHED_CALLS,
    CoverageDocument,
    CoverageRow,
)
from extproc.store.care import EMPTIED, NOTHING, SNAPSHOTS, UNKNOWN as UNTOLD

PROBLEM, NOTE = "problem", "note"
"""Severities of findings."""

_GRAVE = 0.01
"""A reason is a problem if it excludes at least this share of a policy's requests."""

_REASONS_SHOWN = 3
_PRESET = "loopguard init"
_MINUTE = 60
_DAY = 86_400

HOW_TO_ENFORCE = (
    "`loopguard init > policies/agents.json`, then `loopguard serve --policy policies/`"
)
WATCHING = f"no policy is given, so the preset `agents` only watches; to enforce: {HOW_TO_ENFORCE}"


Places: TypeAlias = Mapping[str, tuple[str, str, Any]]
"""The file, JSON Pointer and raw policy, by the policy's id."""


class ServerState(NamedTuple):
    """The state of a server that `/coverage` reports on.

    Attributes:
        store: `memory` or `shared`.
        health: the store's health; `ok` while it is in use.
        watching: whether no policy was given.
        acting: number of enabled policies.
        refused: errors in rejected policy files.
        ramps: for each policy with `enforce_percent`: id, percentage, number of callers acted on,
            number of callers.
        persistence: the weakest persistence of the store's servers; see `StoreCare`.
        must_keep: whether there are budgets, session limits or orders, which must survive a restart
            of the store.
        emptied, kept_since: see `StoreCare`.
    """

    store: str
    health: str
    watching: bool
    limits_sessions: bool
    acting: int
    refused: list[str]
    unenforced: int
    ramps: Sequence[tuple[str, int, int, int]] = ()
    persistence: str = ""
    must_keep: bool = False
    emptied: float = 0.0
    kept_since: float = 0.0


class CoveragePages:
    """The pages about coverage."""

    def __init__(
        self,
        board: Board[CoverageDocument],
        read_state: Callable[[], ServerState],
        locate: Callable[[], Places],
    ) -> None:
        self._board = board
        self._read_state = read_state
        self._locate = locate

    def list_routes(self) -> list[Route]:
        """The routes of all pages."""
        return [Route("/coverage", self._send)]

    def _send(self, request: Request) -> Response:
        report = self.report()
        if prefers_html(request):
            return send_html(request, "coverage.html", report["at"], report=report)
        return send_page(Page(HTTPStatus.OK, report))

    def report(self) -> dict[str, Any]:
        """The JSON of `/coverage`."""
        state, places = self._read_state(), self._locate()
        if state.watching:  # the preset's file in the package must not be edited
            places = {name: (_PRESET, pointer, raw) for name, (_, pointer, raw) in places.items()}
        return make_report(self._board.view(), state, places, time())

    def summarize(self) -> list[dict[str, Any]]:
        """The summary for other reports, in a list, which those of other servers extend."""
        view, state = self._board.view(), self._read_state()
        return [describe_coverage(view.document, state)]


def make_report(
    view: View[CoverageDocument], state: ServerState, places: Places, now: float
) -> dict[str, Any]:
    """The JSON of `/coverage`."""
    document = view.document
    about = [
        *_find_state(document, state),
        *_find_store(state, now),
        *_find_losses(document),
        *_find_ramps(state, places),
    ]
    findings = [*about, *_find_reasons(document, places)]
    rows = [row for row in document.rows if row.policy]
    found = []
    for policy, mode in dict.fromkeys([(row.policy, row.mode) for row in rows]):
        own = [row for row in rows if (row.policy, row.mode) == (policy, mode)]
        recent, total = _sum(own, recent=True), _sum(own, recent=False)
        found.append(
            {
                "policy": policy,
                "mode": mode,
                "place": _write_place(places, policy),
                "requests": sum(recent.values()),
                "counted": recent[COUNTED],
                "not_counted": recent[UNGUARDED],
                "exempt": recent[EXEMPT],
                "since_start": {
                    "requests": sum(total.values()),
                    "counted": total[COUNTED],
                    "not_counted": total[UNGUARDED],
                },
            }
        )
    return {
        **describe_view(view, now),
        **describe_coverage(document, state),
        "build": BUILD,
        "memory": read_memory().describe(),
        "since": write_time(document.since),
        "store": state.store,
        "store_kept_since": write_time(state.kept_since) if state.kept_since else None,
        "store_emptied": write_time(state.emptied) if state.emptied else None,
        "since_start": _add_up(document, recent=False),
        "policies": found,
        "findings": sorted(
            findings, key=lambda finding: (finding["level"] != PROBLEM, -finding["requests"])
        ),
    }


def describe_coverage(document: CoverageDocument, state: ServerState) -> dict[str, Any]:
    """The share of traffic that is guarded, as numbers and as text."""
    recent = _add_up(document, recent=True)
    return {
        "window_seconds": round(document.seconds),
        "seen": recent,
        "watching": state.watching,
        "limits_sessions": state.limits_sessions,
        "line": _write_line(document, recent, state),
    }


def _add_up(document: CoverageDocument, *, recent: bool) -> dict[str, Any]:
    found = {
        row.reason: row.recent if recent else row.total for row in document.rows if not row.policy
    }
    matched, exempt = found.get(REQUESTS, 0), found.get(EXEMPT, 0)
    partly, unguarded = found.get(PARTLY, 0), found.get(UNGUARDED, 0)
    guarded, judged = matched - exempt - partly - unguarded, matched - exempt
    return {
        "requests": matched + found.get(UNMATCHED, 0),
        "unmatched": found.get(UNMATCHED, 0),
        "matched": matched,
        "guarded": guarded,
        "partly_guarded": partly,
        "not_guarded": unguarded,
        "exempt": exempt,
        "guarded_percent": floor(1_000 * guarded / judged) / 10 if judged else None,
    }


def _write_line(document: CoverageDocument, seen: Mapping[str, Any], state: ServerState) -> str:
    span = f"{max(1, round(document.seconds / _MINUTE))} min"
    seen_requests = f"{count(seen['requests'], 'request')} in the last {span}"
    if not document.rows or not any(row.total for row in document.rows):
        told = (
            "no request has reached Loopguard yet; is the filter attached? see `loopguard doctor`"
        )
    elif not seen["requests"]:
        told = f"no requests in the last {span}"
    elif not seen["matched"]:
        told = f"{seen_requests}, and no policy matches any of them; see `loopguard doctor`"
    else:
        told = f"{seen_requests}: {seen['guarded']:,} guarded"
        others = ("partly_guarded", "not_guarded", "exempt", "unmatched")
        told += "".join(
            f", {seen[name]:,} {name.replace('_', ' ')}" for name in others if seen[name]
        )
        if reasons := _list_main_reasons(document):
            told += f" ({', '.join(reasons)}); see `loopguard doctor`"
    if state.emptied > time() - _DAY:
        told += f"; {EMPTIED} (at {write_time(state.emptied)})"
    return f"{told}; {WATCHING}" if state.watching else told


def _list_main_reasons(document: CoverageDocument) -> list[str]:
    counts: Counter[str] = Counter()
    for row in document.rows:
        if row.policy and row.recent and _tells_why(row) and row.reason not in BY_DESIGN:
            counts[row.reason] += row.recent
    return [f"{reason} {count:,}" for reason, count in counts.most_common(_REASONS_SHOWN)]


def _tells_why(row: CoverageRow) -> bool:
    return row.reason not in (COUNTED, UNGUARDED, EXEMPT)


def _sum(rows: Iterable[CoverageRow], *, recent: bool) -> dict[str, int]:
    """The numbers of requests that a policy counted, could not count, and need not count."""
    counts = {COUNTED: 0, UNGUARDED: 0, EXEMPT: 0}
    for row in rows:
        if row.reason in counts:
            counts[row.reason] += row.recent if recent else row.total
    return counts


def _find_reasons(document: CoverageDocument, places: Places) -> list[dict[str, Any]]:
    # With recent requests, older problems are no longer findings
    live = any(row.recent for row in document.rows)
    requests: Counter[tuple[str, str]] = Counter()
    for row in document.rows:
        if not _tells_why(row) and row.policy:
            requests[row.policy, row.mode] += row.recent if live else row.total
    found = []
    for row in document.rows:
        number = row.recent if live else row.total
        if not row.policy or not _tells_why(row) or not number:
            continue
        found.append(
            _describe_reason(row, number, max(requests[row.policy, row.mode], number), places)
        )
    return found


def _write_place(places: Places, policy: str, key: str = "") -> str | None:
    """The place of a policy or of a key in its spec, as in `validate`; None without a file."""
    if policy not in places:
        return None
    file, pointer, _ = places[policy]
    return f"{file}: {pointer}{f'/spec/{key}' if key else ''}" if pointer or key else file


def _describe_reason(row: CoverageRow, number: int, of: int, places: Places) -> dict[str, Any]:
    reason = UNPAID if (row.detector, row.reason) == (BUDGET, MISSING) else row.reason
    repair = REPAIRS.get(reason, UNSTEERED if reason.startswith("unsteered ") else UNKNOWN)
    keys = _list_keys(places[row.policy][2] if row.policy in places else {})
    # Limit keys that most requests have and the policy does not use
    others = (f'"{key}"' for key in ("credential", "ip:address") if key not in keys)
    example = next(others, "a header that all clients send")
    grave = row.reason not in BY_DESIGN and number >= _GRAVE * of
    return {
        "level": PROBLEM if grave else NOTE,
        "reason": row.reason,
        "policy": row.policy,
        "mode": row.mode,
        "detector": row.detector or None,
        "route": row.route or None,
        "requests": number,
        "of": of,
        "since_start": row.total,
        "text": BY_DESIGN.get(row.reason) or repair.text.format(keys=", ".join(keys) or "none"),
        "place": _write_place(places, row.policy, repair.key),
        "change": None if row.reason in BY_DESIGN else repair.change.format(example=example),
    }


def _list_keys(raw: Mapping[str, Any]) -> list[str]:
    """The distinct limit keys of a policy and its rules, including those in a `first_of`."""
    spec = raw.get("spec", {})
    parts = [spec, *spec.get("rules", []), spec.get("fallback_limit") or {}]
    keys = [key for part in parts for key in part.get("limit_keys", [])]
    return list(
        dict.fromkeys(
            [each for key in keys for each in ([key] if isinstance(key, str) else key["first_of"])]
        )
    )


def _find_state(document: CoverageDocument, state: ServerState) -> Iterator[dict[str, Any]]:
    seen = {row.reason: row.total for row in document.rows if not row.policy}
    recent = {row.reason: row.recent for row in document.rows if not row.policy}
    matched, unmatched = seen.get(REQUESTS, 0), seen.get(UNMATCHED, 0)
    if not matched + unmatched:
        text = f"no request has reached Loopguard since {write_time(document.since)}"
        change = (
            "attach the filter: `loopguard envoy-config --snippet`; `loopguard check-envoy "
            "FILE` checks a configuration"
        )
        yield _describe(PROBLEM, "no_requests", text, change)
    elif not matched:
        text = f"no policy matches any of {count(unmatched, 'request')}"
        yield _describe(
            PROBLEM,
            "unmatched",
            text,
            "let a policy's selector match their paths and methods",
            unmatched,
        )
    if calls := recent.get(UNMATCHED_CALLS, 0):
        text = f"{count(calls, 'model call')} passed unguarded, because no policy matches"
        change = 'a policy with "selector": {"apis": "any"} matches them on every path'
        yield _describe(PROBLEM, "unmatched_calls", text, change, calls)
    if state.watching:
        yield _describe(
            NOTE,
            "watching",
            "no policy is given, so the preset `agents` only watches",
            HOW_TO_ENFORCE,
        )
    elif not state.acting:
        text = "all policies are in shadow mode, so no request is acted on"
        yield _describe(
            NOTE, "shadow", text, 'set "mode": "enforce", or start `serve` without --shadow'
        )
    if state.store == "memory":
        text = (
            "counts are only in this process (memory://): several replicas would count separately"
        )
        yield _describe(
            NOTE, "memory_store", text, "if you run several: `serve --store redis://HOST:6379`"
        )
    elif state.health != "ok":
        text = f"the store is not in use, so each replica counts separately: {state.health}"
        yield _describe(PROBLEM, "store_down", text, "restore the store of `serve --store`")
    if state.refused:
        text = f"the policy files have errors, so older policies are in force: {state.refused[0]}"
        yield _describe(PROBLEM, "policies_refused", text, "fix what `loopguard validate` reports")
    if state.unenforced:
        text = f"{count(state.unenforced, 'part')} of policies not enforced (--allow-unenforced)"
        yield _describe(PROBLEM, "unenforced", text, "`loopguard validate` names them")


def _find_ramps(state: ServerState, places: Places) -> Iterator[dict[str, Any]]:
    """Find enforcing policies that act on none of the callers seen."""
    for policy, percent, acting, callers in state.ramps:
        if callers and not acting:
            text = f"{policy}: {tell_share(percent, acting, callers)}"
            change = "raise enforce_percent, or set another ramp_seed"
            place = _write_place(places, policy, "enforce_percent")
            yield {**_describe(PROBLEM, ENFORCES_ON_NONE, text, change), "place": place}


_UNKEPT = {
    NOTHING: (
        PROBLEM,
        "the store loses all data if restarted (`INFO persistence`)",
        "set `appendonly yes` on the server",
    ),
    SNAPSHOTS: (
        NOTE,
        "the store loses changes since its last snapshot when it crashes (`INFO persistence`)",
        "set `appendonly yes` on the server",
    ),
    UNTOLD: (
        NOTE,
        "it is unknown whether the store keeps data when it restarts",
        (
            "give its user `+info` and `+config|get`, or make sure that the server has `appendonly "
            "yes`"
        ),
    ),
}
"""Level, text and change, by a persistence that loses data."""


def _find_store(state: ServerState, now: float) -> Iterator[dict[str, Any]]:
    if state.emptied and state.emptied > now - _DAY:
        text = f"{EMPTIED} (found at {write_time(state.emptied)})"
        yield _describe(
            PROBLEM,
            "store_emptied",
            text,
            "give the orders again, and find out why the server lost its keys",
        )
    if state.must_keep and state.persistence in _UNKEPT:
        level, text, change = _UNKEPT[state.persistence]
        lost = (
            "budgets would be full again, circuit breakers closed, and blocks, kills and "
            "grants gone"
        )
        yield _describe(level, "store_persistence", f"{text}: {lost}", change)


def _find_losses(document: CoverageDocument) -> Iterator[dict[str, Any]]:
    lost = {row.reason: row.recent for row in document.rows if not row.policy}
    if number := lost.get(DROPPED, 0):
        kept = f"{count(number, 'turn')} {'was' if number == 1 else 'were'} not kept"
        text = f"{kept}: callers begin more conversations than the store keeps per caller"
        change = (
            "name the conversations with a header (`session.keys`), or tell the callers "
            "apart (`limit_keys`)"
        )
        yield _describe(PROBLEM, "chains_dropped", text, change)
    if number := lost.get(EVICTED, 0):
        text = (
            f"the memory store was full, and dropped {number:,} "
            f"{'entry' if number == 1 else 'entries'} that still counted"
        )
        change = (
            "`serve --store memory://?max_entries=N` with a larger number, or `serve --store "
            "redis://HOST:6379`"
        )
        yield _describe(PROBLEM, "evicted", text, change)
    if number := lost.get(UNLOGGED, 0):
        text = (
            f"no access log entries arrived for {count(number, 'request')}, so back_to_back "
            "counted none of them; entries with only_without_entries act instead"
        )
        change = (
            "let Envoy send its access log to Loopguard, as `loopguard envoy-config` shows, and "
            "let the filter of another gateway keep Loopguard's metadata"
        )
        yield _describe(PROBLEM, "entries_stopped", text, change)
    if number := lost.get(ABSURD, 0):
        text = (
            f"{number:,} responses report more tokens than any model can use; they are charged "
            "by their size"
        )
        yield _describe(
            PROBLEM,
            "absurd_usage",
            text,
            "fix the usage that the upstream reports, or ask its operator to",
        )


def _describe(level: str, reason: str, text: str, change: str, requests: int = 0) -> dict[str, Any]:
    about = dict.fromkeys(("policy", "mode", "detector", "route"))
    numbers = {"requests": requests, "of": requests, "since_start": requests}
    return {
        "level": level,
        "reason": reason,
        **about,
        **numbers,
        "text": text,
        "place": None,
        "change": change,
    }
