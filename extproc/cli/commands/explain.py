"""`loopguard explain`: shows what the policies do with one request, given with curl's flags."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import SplitResult, urlsplit

from extproc.apis import read_path
from extproc.budgets.guard import BUDGET, make_subject
from extproc.cli.commands import add_key_flag, add_policy_flag, load_policies, read_headers
from extproc.decision import CHOSEN_BY_CLIENTS, MISSING, NOTED, Action, Outcome
from extproc.engine.budget_guard import BudgetGuard
from extproc.engine.engine import Engine
from extproc.engine.exchange import Exchange
from extproc.engine.guards import Guard, LoopGuard, SessionGuard
from extproc.engine.plan import BARE_REFUSED_FROM, Plan
from extproc.engine.ramp import Ramp
from extproc.errors import UsageError
from extproc.ext_proc.answers.refuse import KILLED_SECONDS, KILLED_STATUS, write_loop_message
from extproc.ext_proc.answers.status import describe_status
from extproc.ext_proc.changes.edits import NotEdited
from extproc.ext_proc.changes.steer import steer, write_note
from extproc.logs import escape_controls
from extproc.operator.admin.row_states import count
from extproc.operator.table import find_known
from extproc.policy.bundle import DEFAULT_DETECTOR, EVERYBODY, METHOD
from extproc.request.hash_key import read_hash_key
from extproc.request.http import (
    HttpRequest,
    StatedFacts,
    decode_claims,
    explain_unknowable_body,
    opens_websocket,
)
from extproc.sessions.limits import UNNAMED
from extproc.store.rules.back_to_back import Begin
from extproc.store.rules.budget import PERIOD
from extproc.store.rules.chain import ChainLink
from extproc.store.rules.session import NANO_DOLLARS, RECORD
from extproc.store.rules.windows import Count, Hit

HELP = "show what the policies make of one request"
EXAMPLES = """examples:
  loopguard explain --policy policies/ -X POST -H 'x-user-id: ann' -d '{"model": "m"}' https://api.example.com/v1/chat/completions
  loopguard explain --policy policies/ --claim org_id=org-abc -d @body.json http://localhost:10000/v1/messages"""

_Rows: TypeAlias = list[tuple[str, str]]


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_policy_flag(parser)
    parser.add_argument(
        "-X", "--request", metavar="METHOD", help="request method (default GET, or POST with -d)"
    )
    parser.add_argument(
        "-H",
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="request header; repeatable",
    )
    parser.add_argument(
        "-d", "--data", metavar="BODY|@FILE", help="request body, @- for standard input"
    )
    parser.add_argument(
        "--claim",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a verified JWT claim; repeatable",
    )
    parser.add_argument(
        "--address",
        default="127.0.0.1",
        metavar="IP",
        help="the caller's address (default 127.0.0.1)",
    )
    parser.add_argument("--route", default="", metavar="NAME", help="name of the Envoy route")
    parser.add_argument(
        "--allow-unverified-jwt",
        action="store_true",
        help="take claims from -H 'authorization: Bearer ...'",
    )
    parser.add_argument("--shadow", action="store_true", help="as serve --shadow")
    add_key_flag(parser)
    parser.add_argument("url", metavar="URL")


def run(options: argparse.Namespace) -> int:
    policies = load_policies(options.policy)
    body = _read_body(options.data)
    request = _make_request(options, body)
    now = datetime.now(UTC)
    engine = Engine(policies, now, shadow=options.shadow)
    switch = engine.find_switch(request, now.timestamp())
    if switch is not None:
        shadow = options.shadow
        told = f"reject with {KILLED_STATUS} (Retry-After: {KILLED_SECONDS})"
        rows = [
            ("kill switch", f"{switch.place} ({switch.scope_key})"),
            ("decision", f"report: would {told}" if shadow else told),
        ]
        _print_rows(rows if not switch.reason else [rows[0], ("reason", switch.reason), rows[1]])
        if not options.shadow:
            return 0
    request.hash_key = key = read_hash_key(options.hash_key_file)
    ramps = {
        plan.id: _describe_ramp(plan.ramp, request)
        for plan in engine.match(request)
        if plan.ramp is not None
    }
    exchange = engine.prepare(request, key=key)
    if exchange is None:
        print(
            escape_controls(
                f"no policy matches {request.method} {request.path}: the request passes uncounted"
            )
        )
        return 0
    reason = (
        explain_unknowable_body(request) if exchange.needs_body or request.opens_responses else ""
    )
    exchange.read_body(None if reason else exchange.sum_up(body), reason, body)
    missing = [entry for group in exchange.groups for entry in group.missing]
    for policy, detector, why in exchange.list_left_out():
        if (
            (detector, why) == (BUDGET, MISSING)
            and exchange.enforcing.forbidden is None
            and not _is_charged(exchange, policy)
        ):
            continue  # printed below, with its rules
        named = [("detector", detector)] if detector not in ("", DEFAULT_DETECTOR) else []
        more = ramps.get(policy, []) + _list_missing(missing, policy, request)
        more += _list_session_keys(engine, policy) if why == UNNAMED else []
        if (policy, why) == exchange.enforcing.forbidden:
            more.append(("decision", f"reject with {CHOSEN_BY_CLIENTS[why][0]}"))
        _print_rows([("policy", policy), *named, *more, ("uncounted", why)])
    for group in exchange.groups:
        for guard in group.active:
            policy = guard.plan.id
            more = ramps.get(policy, []) + _list_missing(missing, policy, request)
            _print_guard(guard, exchange, body, more)
    for plan in exchange.plans:
        _print_idle_budgets(plan, exchange, missing)
    return 0


def _is_charged(exchange: Exchange, policy: str) -> bool:
    return any(budget.plan.id == policy for budget in exchange.budgets)


def _print_idle_budgets(plan: Plan, exchange: Exchange, missing: Sequence[tuple[str, str]]) -> None:
    left_out = [
        why
        for policy, guard, why in exchange.list_left_out()
        if (policy, guard) == (plan.id, BUDGET)
    ]
    explained = exchange.enforcing.forbidden is not None if MISSING in left_out else bool(left_out)
    if plan.budget is None or _is_charged(exchange, plan.id) or explained:
        return
    fallback = plan.budget.fallback
    rules = [*plan.budget.rules, *([fallback] if fallback is not None else [])]
    rows: _Rows = [("policy", f"{plan.id} ({plan.mode})")]
    for planned in rules:
        if not planned.matches(exchange.request):
            why = "its match does not hold"
        elif planned.rule.cost.measured and not read_path(exchange.request.path).asks_model:
            why = "its cost is that of a model's answer, and this path asks no model"
        else:
            why = "a limit key is missing"
        rows.append(("rule", f"{planned.rule.name}: {why}"))
    _print_rows(
        [
            *rows,
            *_list_missing(missing, plan.id, exchange.request),
            ("decision", "allow: no rule applies"),
        ]
    )


def _print_guard(guard: Guard, exchange: Exchange, body: bytes, more: _Rows) -> None:
    if isinstance(guard, LoopGuard):
        _print_detector(guard, exchange, body, more)
    elif isinstance(guard, SessionGuard):
        limiter = guard.limiter
        calls = len(guard.calls.records) // RECORD
        shown = f"{count(calls, 'call')} of tools" if not guard.unreadable else guard.unreadable
        dollars, model = guard.reserve / NANO_DOLLARS, guard.model or "no model"
        rows = [
            ("policy", f"{guard.plan.id} ({limiter.mode})"),
            ("session", guard.session),
            *more,
            ("tenant", guard.tenant),
            *_show_known(guard),
            ("key", guard.name_ledger()),
            ("history", shown),
            ("cost", f"{dollars:.6f} dollars for the prompt, estimated, with {model}"),
        ]
        would, allowed = "report: would " if limiter.shadow else "", ["allow"]
        if limits := limiter.describe(guard.session):
            status = limiter.refusal.status or describe_status(final=True)
            allowed = [f"allow up to {limits}, then {would}reject with {status}"]
        if limiter.growth and guard.session != UNNAMED:
            allowed.append(f"{would}steer from {limiter.growth} times the first input")
        _print_rows([*rows, ("decision", ", ".join(allowed))])
    elif isinstance(guard, BudgetGuard):
        _print_budgets(guard, more)


def _describe_ramp(ramp: Ramp, request: HttpRequest) -> _Rows:
    """Whether the policy acts on the request's caller, and why, as rows."""
    place, keys = ramp.find_place(request), " and ".join(ramp.keys)
    if not place:
        return [("ramp", f"out, so in shadow mode: the request has no {keys}")]
    found = (
        f"place {place} of {EVERYBODY} by {keys} (seed {ramp.seed}); the policy acts on "
        f"places 1 to {ramp.percent}"
    )
    return [("ramp", f"in: {found}" if ramp.covers(place) else f"out, so in shadow mode: {found}")]


def _list_missing(missing: Sequence[tuple[str, str]], policy: str, request: HttpRequest) -> _Rows:
    keys = [key for owner, key in missing if owner == policy]
    return [("missing", f"{key}{_explain_missing(key, request)}") for key in keys]


def _list_session_keys(engine: Engine, policy: str) -> _Rows:
    plan = engine.find_plan(policy)
    keys = (
        [key.key for key in plan.limiter.names.list_keys()]
        if plan is not None and plan.limiter is not None
        else []
    )
    return list(
        zip(
            chain(["missing"], repeat("")),
            [*(f"{key}, or" for key in keys[:-1]), *keys[-1:]],
            strict=False,
        )
    )


def _explain_missing(key: str, request: HttpRequest) -> str:
    source, _, name = key.partition(":")
    if source == "jwt" and request.read_header("authorization")[:7].lower() == "bearer ":
        return (
            ": authorization: Bearer is given, but not verified; see --claim and "
            "--allow-unverified-jwt"
        )
    if source == "jwt":
        return f": no claim of that name was verified; give --claim {name}=VALUE"
    return ""


def _print_budgets(guard: BudgetGuard, more: _Rows) -> None:
    """Print a block per budget, without the amount left, which only the store knows."""
    rules = guard.budget
    if guard.oversize is not None:
        subject = guard.oversize
        told = (
            f"{subject.reason.value}: about {subject.asked:.9g} tokens, and at most "
            f"{subject.limit:.9g} are allowed"
        )
        _print_rows(
            [
                ("policy", f"{guard.plan.id} ({rules.mode})"),
                ("budget", subject.rule),
                *more,
                ("decision", told),
            ]
        )
    for reserved in guard.reserved:
        limit, subject = reserved.limit, make_subject(reserved)
        unit = f" {subject.unit}" if subject.unit else ""
        final = reserved.take.amount > reserved.take.limit
        status = reserved.rule.refusal.status or (
            describe_status(final=True) if final else KILLED_STATUS
        )
        refusal = (
            f"{'report: would reject' if rules.shadow else 'reject'} with {status} "
            f"({limit.reason.value})"
        )
        cost = (
            "estimated, settled after the response"
            if reserved.rule.cost.measured
            else "fixed before the request is sent on"
        )
        stages = []
        for stage in reversed(reserved.rule.stages) if limit.kind == PERIOD else ():
            delay = f" by {stage.delay_ms} ms" if stage.delay_ms else ""
            stages.append(("stage", f"{stage.action.value}{delay} from {stage.percent:g} % on"))
        rows = [
            ("policy", f"{guard.plan.id} ({rules.mode})"),
            ("budget", f"{subject.rule}: {subject.limit:.9g}{unit} in {subject.span}"),
            *more,
            ("tenant", reserved.tenant),
            ("key", reserved.take.key),
            ("cost", f"{subject.asked:.9g}{unit}, {cost}"),
            *stages,
            (
                "decision",
                refusal
                if final
                else f"allow while {subject.asked:.9g}{unit} is left, then {refusal}",
            ),
        ]
        _print_rows(rows)


def _show_known(guard: Guard) -> _Rows:
    known = find_known(guard)
    rows = [("credential", credential) for credential in known.credentials] + [
        ("alias", known.alias)
    ] * bool(known.alias)
    return rows + [("label", f"{name}: {value}") for name, value in known.labels]


def _print_detector(guard: LoopGuard, exchange: Exchange, body: bytes, more: _Rows) -> None:
    detector, hit = guard.detector, guard.hit
    rows = [("policy", f"{guard.plan.id} ({detector.mode})")]
    if detector.name != DEFAULT_DETECTOR or detector.looks:
        rows.append(("detector", f"{detector.name} ({detector.similarity_name})"))
    if detector.looks and exchange.plain is not None:
        rows += zip(
            chain(["compared"], repeat("")), detector.similarity.show(exchange.plain), strict=False
        )
    rows += more
    rows += [
        ("composite", guard.composite),
        ("fingerprint", guard.fingerprint),
        ("tenant", guard.tenant),
    ]
    rows += _show_known(guard)
    for push in guard.pushes:
        kind = "chain" if isinstance(push, ChainLink) else "ring"
        rows.append((kind, f"{push.key}: earlier turns, which explain does not read"))
    if hit is not None:
        rows.append(("key", hit.key))
    rows.append(("decision", _describe_decision(guard)))
    if _may_steer(guard):
        rows += _show_note(guard, exchange, body)
    if guard.repeat is not None and guard.repeat.looping:
        outcome = _make_outcome(guard, guard.repeat.step)
        if outcome.action is Action.REJECT:
            rows.append(("message", write_loop_message(outcome, exchange.request)))
    _print_rows(rows)


def _may_steer(guard: LoopGuard) -> bool:
    """Whether this request may get a note; if only the store has the counts, whether any can."""
    detector, found = guard.detector, guard.repeat
    if not detector.steers or not detector.stateless:
        return detector.steers
    return found is not None and found.looping and detector.find_action(found) in NOTED


def _show_note(guard: LoopGuard, exchange: Exchange, body: bytes) -> _Rows:
    detector, request = guard.detector, exchange.request
    found = guard.repeat
    now = found.step if found is not None and found.looping else 0
    step = next(
        step for step, action in enumerate(detector.actions) if step >= now and action in NOTED
    )
    note = write_note(_make_outcome(guard, step), exchange, detector)
    try:
        steer(request, body, note, partial(exchange.make_marks, guard), exchange.document)
    except NotEdited as why:
        return [("unsteered", f"let through with a warning: {why.reason}")]
    return [("note", note)]


def _print_rows(rows: Iterable[tuple[str, str]]) -> None:
    for name, value in rows:
        print(f"{name:<12} {escape_controls(value)}")
    print()


_SPARED: Final = (
    "; the body has neither tools nor a turn of the assistant, "
    f"so it is refused from {BARE_REFUSED_FROM} on"
)


def _describe_decision(guard: LoopGuard) -> str:
    """The action for this request, or for the one that reaches the threshold."""
    detector, found = guard.detector, guard.repeat
    if not detector.stateless:
        allowed = detector.list_thresholds(guard.subject)[0] - 1
        return (
            f"allow {count(allowed, 'identical request')}, then {_describe_steps(guard)}; "
            f"window {detector.window_type}, {detector.window_seconds} s"
            f"{', while no access log entries arrive' if detector.stands_in else ''}"
            f"{_SPARED if guard.is_bare else ''}"
        )
    state = detector.similarity.describe(found)
    if found is None:
        return f"allow: {state}"
    if found.looping:
        return f"{_describe_action(guard, found.step)}; {state}"
    return f"allow below {found.threshold} identical calls, then {_describe_steps(guard)}; {state}"


def _describe_steps(guard: LoopGuard) -> str:
    first, *others = guard.detector.list_thresholds(guard.subject)
    # A tool may have a threshold of its own
    begins = guard.repeat.threshold if guard.repeat is not None else first
    later = [(step, threshold - first + begins) for step, threshold in enumerate(others, 1)]
    described = [
        f"from {threshold} on {_describe_action(guard, step)}" for step, threshold in later
    ]
    return ", ".join([_describe_action(guard, 0), *described])


def _make_outcome(guard: LoopGuard, step: int) -> Outcome:
    """The outcome for the request that reaches this step's threshold."""
    detector, found, subject = guard.detector, guard.repeat, guard.subject
    threshold = detector.list_thresholds(subject)[step]
    last = step == len(detector.actions) - 1 and not (found is not None and found.held)
    cooldown_ms = guard.hit.cooldown_ms if isinstance(guard.hit, Hit | Begin) and last else 0
    if found is not None and not found.looping:
        found = found._replace(count=found.threshold, step=step)
    counted = Count(threshold, looping=last, cooldown_ms=cooldown_ms, span_ms=0)
    return detector.judge(guard.fingerprint, guard.tenant, counted, subject, found)


def _describe_action(guard: LoopGuard, step: int) -> str:
    outcome = _make_outcome(guard, step)
    framed = guard.subject.frame("", "")
    status = (
        (outcome.refusal.status or describe_status(final=outcome.retry_after is None))
        if framed is None
        else framed.status
    )
    answer = (
        "an answer of the API, or if that is unknown with " if outcome.refusal.completes else ""
    )
    again = f" (Retry-After: {outcome.retry_after})" if outcome.retry_after is not None else ""
    told = {
        "reject": f"reject with {answer}{status}{again}",
        "throttle": f"throttle (hold {outcome.delay_ms} ms at first)",
        "land": "land (a final answer without tool calls)",
    }.get(outcome.action.value, outcome.action.value)
    return f"report: would {told}" if guard.detector.shadow else told


def _read_body(data: str | None) -> bytes:
    if data is None:
        return b""
    if not data.startswith("@"):
        return data.encode("utf-8", "surrogateescape")
    try:
        return Path(data[1:]).read_bytes() if data != "@-" else sys.stdin.buffer.read()
    except OSError as error:
        raise UsageError(f"-d {data}: cannot be read: {error.strerror}") from None


def _split_url(text: str) -> SplitResult:
    """Split a URL like curl, whose scheme is optional; a path alone is enough.

    Raises UsageError.
    """
    try:
        url = urlsplit(text if "://" in text else f"http://{text}")
        _ = url.port  # raises ValueError if invalid
    except ValueError as error:
        raise UsageError(f"{text!r} is not a URL: {error}") from None
    if url.scheme not in ("http", "https"):
        raise UsageError(f"{text!r} is not a URL of http or https")
    if not (url.hostname or text.startswith("/")):
        raise UsageError(f"{text!r} is not a URL: it has no host")
    if re.search(r"[\x00-\x20\x7f]", text):
        raise UsageError(f"{text!r} is not a URL: percent-encode spaces and control characters")
    return url


def _make_request(options: argparse.Namespace, body: bytes) -> HttpRequest:
    url = _split_url(options.url)
    if options.request is not None and not METHOD.match(options.request):
        raise UsageError(f"-X {options.request!r} must be an HTTP method such as POST")
    headers: dict[str, bytes] = {}
    for name, value in read_headers(options.header):
        headers.setdefault(name, value.encode("utf-8", "surrogateescape"))
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    method = options.request or ("POST" if body else "GET")
    authority = (
        headers.get("host", b"").decode("utf-8", "surrogateescape") or url.netloc.rpartition("@")[2]
    )
    facts = StatedFacts(
        route=options.route, address=options.address, claims=_read_claims(options, headers)
    )
    request = HttpRequest(method, target, authority, headers, facts)
    request.opens_responses = opens_websocket(request) and read_path(request.path).websocket
    return request


def _read_claims(options: argparse.Namespace, headers: dict[str, bytes]) -> dict[str, str]:
    claims = {}
    if options.allow_unverified_jwt:
        claims = decode_claims(headers.get("authorization", b"").decode("utf-8", "surrogateescape"))
    for pair in options.claim:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--claim {pair!r} must be NAME=VALUE")
        claims[name] = value
    return claims
