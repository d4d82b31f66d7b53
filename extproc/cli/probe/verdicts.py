"""Sends the requests of a probe, and tells which of them Loopguard guards."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from rich.console import Console
from rich.table import Table
from rich.text import Text

from extproc.cli.envoy_check.inspect import CheckReport
from extproc.cli.probe.client import ProbeAnswer, find_http3, send
from extproc.cli.probe.spellings import HTTP_3_PLAIN, Spelling, list_spellings
from extproc.errors import UsageError
from extproc.operator.admin.client import AdminClient
from extproc.operator.coverage import BY_DESIGN
from extproc.operator.probes import PROBE_HEADER
from extproc.policy.loader import PolicySet

GUARDED, STOPPED, UNKNOWN, NOT_SENT, UNGUARDED = "guarded", "stopped", "no such path", "NOT SENT", "UNGUARDED"

_SECONDS = 30.0
_LATE_SECONDS = 1.0
_MOST_PATHS = 20
_REFUSED = 400
_REDIRECTED = 300
_HTTPS = 443
_NO_SUCH_PATH = (404, 405)
_HEADERS = (("user-agent", "loopguard-probe"), ("content-type", "application/json"))

Noted = Mapping[str, Any]
"""What a Loopguard says about a request: `matched`, `counted` and `left_out` policies."""

_NOTHING: Noted = {"matched": [], "counted": [], "left_out": {}}


class ProbeSettings(NamedTuple):
    """What is sent.

    Attributes:
        headers: with every request.
        big: the size of the large body, in bytes.
        http3: also over HTTP/3 where the gateway does not advertise it: to the URL's own port.
    """

    headers: Sequence[tuple[str, str]]
    big: int
    http3: bool


class Result(NamedTuple):
    """One request, its answer, and what that means."""

    url: str
    path: str
    spelling: Spelling
    reply: ProbeAnswer
    verdict: str
    why: str

    def describe(self) -> dict[str, Any]:
        """As JSON-ready values."""
        sent = {"url": self.url, "path": self.spelling.path, "request": self.spelling.name}
        return {**sent, "status": self.reply.status, "verdict": self.verdict, "why": self.why}


def list_paths(policies: PolicySet | None, report: CheckReport | None) -> list[str]:
    """The paths to probe: those of policies, and those of a configuration's guarded routes."""
    found: list[str] = []
    for policy in policies.list_acting() if policies is not None else ():
        selector = policy.spec.selector
        found += [path for path in (selector.pathExact, *selector.list_prefixes()) if path is not None]
    for route in report.routes if report is not None else ():
        match = route.route.place.get("match")
        named = [match.get(kind).text() for kind in ("path", "path_separated_prefix", "prefix")] if route.modes else []
        found += [path for path in named if path]
    return list(dict.fromkeys(found))[:_MOST_PATHS]


def read_headers(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Parse `NAME: VALUE`; raises UsageError for anything else."""
    found = []
    for text in texts:
        name, colon, value = text.partition(":")
        if not (colon and name.strip()) or not text.isprintable():
            raise UsageError(f"--header must be 'NAME: VALUE', not {text!r}")
        found.append((name.strip().lower(), value.strip()))
    return found


def probe(
    urls: Sequence[str],
    paths: Sequence[str],
    clients: Sequence[AdminClient],
    given: ProbeSettings,
) -> list[Result]:
    """Send every spelling to every listener, then ask the Loopguards about them; raises LoopguardError if one fails."""
    name = secrets.token_hex(16)
    listeners = [(text, _parse_url(text)) for text in urls]
    for client in clients:
        client.ask(f"/probes/{name}")
    sent: list[tuple[str, str, Spelling, ProbeAnswer, str]] = []
    for text, url in listeners:
        for path in [url.path] if url.path not in ("", "/") else paths or ["/"]:
            over_udp = (url.hostname or "", url.port or _HTTPS) if given.http3 and url.scheme == "https" else None
            for spelling in list_spellings(path, f"{name}.{len(sent)}", given.big):
                mark = f"{name}.{len(sent)}"
                headers = [*_HEADERS, *given.headers, (PROBE_HEADER, mark)]
                reply = send(url, spelling, headers, _SECONDS, over_udp)
                sent.append((text, path, spelling, reply, mark))
                if spelling.name == HTTP_3_PLAIN and not reply.status:
                    break  # all others would wait for the same
                over_udp = find_http3(url, reply.offers) or over_udp
    noted = _ask(clients, name)
    if any(mark not in noted for *_, mark in sent):
        time.sleep(_LATE_SECONDS)  # where Envoy does not wait for Loopguard
        noted = _ask(clients, name)
    plain = {(text, path): reply for text, path, _, reply, _ in reversed(sent)}
    return [
        Result(text, path, spelling, reply, *judge(spelling, reply, noted.get(mark), plain[text, path]))
        for text, path, spelling, reply, mark in sent
    ]


def _parse_url(text: str) -> SplitResult:
    try:
        url = urlsplit(text)
        fits = url.scheme in ("http", "https") and url.hostname and url.port != 0 and text.isprintable() and " " not in text
    except ValueError:
        fits = False
    if not fits:
        raise UsageError(f"--probe must be http(s)://HOST[:PORT][/PATH], not {text!r}")
    return url


def _ask(clients: Sequence[AdminClient], name: str) -> dict[str, Noted]:
    return {mark: noted for client in clients for mark, noted in client.ask(f"/probes/{name}")["requests"].items()}


def judge(spelling: Spelling, reply: ProbeAnswer, noted: Noted | None, plain: ProbeAnswer) -> tuple[str, str]:
    """The verdict about a request, and the reason; `plain` is the answer to the usual spelling of the same path."""
    matched, counted, left_out = (noted or _NOTHING)["matched"], (noted or _NOTHING)["counted"], (noted or _NOTHING)["left_out"]
    told = ", ".join(f"{policy}: {reason}" for policy, reason in left_out.items())
    if counted:
        return GUARDED, f"counted by {', '.join(counted)}{f'; not by {told}' if told else ''}"
    if left_out and BY_DESIGN.keys() >= set(left_out.values()):
        return GUARDED, f"left out on purpose ({told})"
    if not (reply.reached or 0 < reply.status < _REDIRECTED):
        return STOPPED if reply.sent else NOT_SENT, _explain(reply)
    if matched:
        return UNGUARDED, f"matches {', '.join(matched)}, but is not counted{f' ({told})' if told else ''}"
    if spelling.alias and reply.status in _NO_SUCH_PATH and reply.status != plain.status:
        return UNKNOWN, f"the upstream answers {reply.status}"
    return UNGUARDED, "Loopguard is not asked" if noted is None else "no policy matches"


def _explain(reply: ProbeAnswer) -> str:
    if not reply.status:
        return reply.error
    return f"redirected ({reply.status})" if reply.status < _REFUSED else f"the gateway answers {reply.status}"


def is_guarded(results: Sequence[Result], ignored: Sequence[str]) -> bool:
    """Whether only `ignored` requests can pass unguarded, and Loopguard has decided some for each listener and path."""
    probed = {(result.url, result.path) for result in results}
    guarded = {(result.url, result.path) for result in results if result.verdict == GUARDED}
    unguarded = {result.spelling.name for result in results if result.verdict in (UNGUARDED, NOT_SENT)}
    return probed == guarded and unguarded <= {*ignored}


def print_results(results: Sequence[Result], console: Console) -> None:
    """Print a table for each listener and path, and a sum."""
    for url, path in dict.fromkeys((result.url, result.path) for result in results):
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        for column in (f"{urlsplit(url)._replace(path=path).geturl()}", "status", "verdict", "why"):
            table.add_column(Text(column), overflow="fold")
        own = [result for result in results if (result.url, result.path) == (url, path)]
        for result in own:
            style = {GUARDED: "green", UNGUARDED: "bold red", NOT_SENT: "bold red"}.get(result.verdict, "")
            table.add_row(
                Text(result.spelling.name), str(result.reply.status or "-"), Text(result.verdict, style), Text(result.why)
            )
        console.print(table)
        if not any(result.verdict == GUARDED for result in own):
            console.print("  Loopguard has decided none of these: check the path, and credentials (-H)")
    found = [result.verdict for result in results]
    counted = (GUARDED, STOPPED, UNKNOWN, *([NOT_SENT] if NOT_SENT in found else ()), UNGUARDED)
    console.print(", ".join(f"{verdict}: {found.count(verdict)}" for verdict in counted))
