"""`check-envoy --probe`: sends marked requests through a gateway and asks Loopguard about each."""

from __future__ import annotations

import gzip
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import httpx
from rich.console import Console
from rich.text import Text

from extproc.apis import SAMPLES
from extproc.cli.envoy_check.inspect import CheckReport
from extproc.cli.envoy_check.show import make_table
from extproc.errors import UsageError
from extproc.logs import escape_controls
from extproc.operator.admin.client import AdminClient
from extproc.operator.coverage import BY_DESIGN
from extproc.operator.probes import PROBE_HEADER
from extproc.policy.loader import PolicySet

GUARDED, STOPPED, UNKNOWN, UNGUARDED = "guarded", "stopped", "no such path", "UNGUARDED"

_SECONDS = 30.0
_LATE_SECONDS = 1.0
_MOST_PATHS = 20
_REDIRECTED, _REFUSED = 300, 400
_NO_SUCH_PATH = (404, 405)
_UPSTREAM_TIME = "x-envoy-upstream-service-time"
_HEADERS = (("user-agent", "loopguard-probe"), ("content-type", "application/json"))
_UPGRADE = (
    ("connection", "Upgrade"), ("upgrade", "websocket"), ("sec-websocket-version", "13"),
    ("sec-websocket-key", "bG9vcGd1YXJkLXByb2JlIQ=="),
)  # fmt: skip

_NOTHING: Mapping[str, Any] = {"matched": [], "counted": [], "left_out": {}}


class ProbeRequest(NamedTuple):
    """One variant of a request.

    Attributes:
        name: the variant's name in reports.
        path: the path as sent.
        alias: whether the path differs from the policy's, so that an upstream may not know it.
        chunked: whether the body is sent without `content-length`.
    """

    name: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    method: str = "POST"
    http2: bool = False
    alias: bool = False
    chunked: bool = False


class ProbeAnswer(NamedTuple):
    """A gateway's answer.

    Attributes:
        status: HTTP status; 0 without an answer.
        reached: whether the upstream answered, not Envoy itself.
        error: why there is no answer.
    """

    status: int
    reached: bool = False
    error: str = ""


class Result(NamedTuple):
    url: str
    path: str
    request: ProbeRequest
    answer: ProbeAnswer
    verdict: str
    why: str

    def describe(self) -> dict[str, Any]:
        sent = {"url": self.url, "path": self.request.path, "request": self.request.name}
        return {**sent, "status": self.answer.status, "verdict": self.verdict, "why": self.why}


def list_requests(path: str, mark: str, big: int) -> Iterator[ProbeRequest]:
    """The requests for a path.

    `mark` makes each body unique, so that no probe is a loop; `big` is in bytes.
    """

    def write(name: str, size: int = 0) -> bytes:
        message = {"role": "user", "content": f"loopguard probe {mark} {name} {'x' * size}"}
        return json.dumps({"model": "loopguard-probe", "messages": [message]}).encode()

    zipped = (("content-encoding", "gzip"),)
    for http2, name in ((False, "HTTP/1.1"), (True, "HTTP/2")):
        yield ProbeRequest(name, path, write(name), http2=http2)
        yield ProbeRequest(f"{name}, large body", path, write(f"{name} large", big), http2=http2)
        yield ProbeRequest(
            f"{name}, gzip body", path, gzip.compress(write(f"{name} gzip")), zipped, http2=http2
        )
    yield ProbeRequest("HTTP/1.1, chunked", path, write("chunked"), chunked=True)
    yield ProbeRequest(
        "HTTP/1.1, large body, chunked", path, write("large chunked", big), chunked=True
    )
    for name, spelling in _spell(path).items():
        yield ProbeRequest(name, spelling, write(name), alias=True)
    yield ProbeRequest("WebSocket upgrade", path, headers=_UPGRADE, method="GET")


def _spell(path: str) -> dict[str, str]:
    """Other spellings of a path that some upstreams treat as equal."""
    first, slash, rest = path[1:].partition("/")
    escaped = f"%{ord(first[0]):02X}{first[1:]}" if first.isascii() and first else first
    return {
        "dot segments": f"/loopguard-probe/..{path}",
        "doubled slash": f"/{path}",
        "escaped slash": f"/{first}%2F{rest}" if slash else f"/.%2F{first}",
        "escaped letter": f"/{escaped}{slash}{rest}",
        "upper case": path.upper(),
        "path parameter": f"{path};loopguard=probe",
        "path parameter of the first segment": f"/{first};loopguard=probe{slash}{rest}",
    }


def list_names() -> list[str]:
    return [request.name for request in list_requests("/", "", 0)]


def send(
    url: SplitResult, request: ProbeRequest, headers: Sequence[tuple[str, str]]
) -> ProbeAnswer:
    """Send a request on its own connection and wait for the response headers."""
    content = iter([request.body]) if request.chunked else request.body
    # httpx would remove dot segments
    target = {"target": request.path.encode("utf-8", "surrogateescape")}
    try:
        with httpx.Client(
            http1=not request.http2, http2=request.http2, timeout=_SECONDS, trust_env=False
        ) as client:
            given = [*headers, *request.headers]
            built = client.build_request(
                request.method,
                url._replace(path="/", query="").geturl(),
                headers=given,
                content=content,
                extensions=target,
            )
            answer = client.send(built, stream=True)
            answer.close()
    except httpx.TimeoutException:
        return ProbeAnswer(0, error=f"no answer within {_SECONDS:g} s")
    except (httpx.HTTPError, OSError) as error:
        return ProbeAnswer(0, error=str(error) or type(error).__name__)
    return ProbeAnswer(answer.status_code, _UPSTREAM_TIME in answer.headers)


def list_paths(policies: PolicySet | None, report: CheckReport | None) -> list[str]:
    """The paths to probe: those of the policies and of the configuration's guarded routes."""
    found: list[str] = []
    for policy in policies.list_acting() if policies is not None else ():
        selector = policy.spec.selector
        found += [
            path for path in (selector.pathExact, *selector.list_prefixes()) if path is not None
        ]
        found += [SAMPLES[api][0] for api in selector.list_apis() if selector.spans_apis()]
    for route in report.routes if report is not None else ():
        found += [route.route.pattern.find_example()] if route.modes else []
    return list(dict.fromkeys([path for path in found if path]))[:_MOST_PATHS]


def probe(
    urls: Sequence[str],
    paths: Sequence[str],
    clients: Sequence[AdminClient],
    headers: Sequence[tuple[str, str]],
    big: int,
) -> list[Result]:
    """Send every request to every listener, then ask every Loopguard; raises LoopguardError."""
    name = secrets.token_hex(16)
    listeners = [(text, _parse_url(text)) for text in urls]
    for client in clients:
        client.ask(f"/probes/{name}")
    sent: list[tuple[str, str, ProbeRequest, ProbeAnswer, str]] = []
    for text, url in listeners:
        for path in [url.path] if url.path not in ("", "/") else paths or ["/"]:
            for request in list_requests(path, f"{name}.{len(sent)}", big):
                mark = f"{name}.{len(sent)}"
                answer = send(url, request, [*_HEADERS, *headers, (PROBE_HEADER, mark)])
                sent.append((text, path, request, answer, mark))
    noted = _ask(clients, name)
    if any(mark not in noted for *_, mark in sent):
        time.sleep(_LATE_SECONDS)  # some Envoys do not wait for Loopguard
        noted = _ask(clients, name)
    plain = {(text, path): answer for text, path, _, answer, _ in reversed(sent)}
    return [
        Result(
            text, path, request, answer, *judge(request, answer, noted.get(mark), plain[text, path])
        )
        for text, path, request, answer, mark in sent
    ]


def _parse_url(text: str) -> SplitResult:
    try:
        url = urlsplit(text)
        fits = (
            url.scheme in ("http", "https")
            and url.hostname
            and url.port != 0
            and text.isprintable()
            and " " not in text
        )
    except ValueError:
        fits = False
    if not fits:
        raise UsageError(f"--probe must be http(s)://HOST[:PORT][/PATH], not {text!r}")
    return url


def _ask(clients: Sequence[AdminClient], name: str) -> dict[str, Mapping[str, Any]]:
    return {
        mark: noted
        for client in clients
        for mark, noted in client.ask(f"/probes/{name}")["requests"].items()
    }


def judge(
    request: ProbeRequest, answer: ProbeAnswer, noted: Mapping[str, Any] | None, plain: ProbeAnswer
) -> tuple[str, str]:
    """Judge a request; returns the verdict and the reason.

    Args:
        request: what was sent.
        answer: the answer to it.
        noted: Loopguard's account of it: `matched`, `counted` and `left_out` policies; None if it
            did not see the request.
        plain: the answer to the first request for the same path.
    """
    matched, counted, left_out = [
        (noted or _NOTHING)[key] for key in ("matched", "counted", "left_out")
    ]
    told = ", ".join(f"{policy}: {reason}" for policy, reason in left_out.items())
    if counted:
        return GUARDED, f"counted by {', '.join(counted)}{f'; not by {told}' if told else ''}"
    if left_out and BY_DESIGN.keys() >= set(left_out.values()):
        return GUARDED, f"left out on purpose ({told})"
    if not (answer.reached or 0 < answer.status < _REDIRECTED):
        what = (
            f"redirected ({answer.status})"
            if answer.status < _REFUSED
            else f"the gateway answers {answer.status}"
        )
        return STOPPED, what if answer.status else answer.error
    if matched:
        return (
            UNGUARDED,
            f"matches {', '.join(matched)}, but is not counted{f' ({told})' if told else ''}",
        )
    if request.alias and answer.status in _NO_SUCH_PATH and answer.status != plain.status:
        return UNKNOWN, f"the upstream answers {answer.status}"
    return UNGUARDED, "Loopguard is not asked" if noted is None else "no policy matches"


def is_guarded(results: Sequence[Result], ignored: Sequence[str]) -> bool:
    """Whether only `ignored` requests are unguarded, and each path of a listener has others."""
    probed = {(result.url, result.path) for result in results}
    guarded = {(result.url, result.path) for result in results if result.verdict == GUARDED}
    unguarded = {result.request.name for result in results if result.verdict == UNGUARDED}
    return probed == guarded and unguarded <= {*ignored}


def print_results(results: Sequence[Result], console: Console) -> None:
    """Print a table for each listener and path, and totals."""
    for url, path in dict.fromkeys((result.url, result.path) for result in results):
        table = make_table(urlsplit(url)._replace(path=path).geturl(), "status", "verdict", "why")
        own = [result for result in results if (result.url, result.path) == (url, path)]
        for result in own:
            style = {GUARDED: "green", UNGUARDED: "bold red"}.get(result.verdict, "")
            name, status = Text(result.request.name), str(result.answer.status or "-")
            table.add_row(
                name, status, Text(result.verdict, style), Text(escape_controls(result.why))
            )
        console.print(table)
        if not any(result.verdict == GUARDED for result in own):
            console.print(
                "  Loopguard has decided none of these: check the path, and credentials (-H)"
            )
    found = [result.verdict for result in results]
    console.print(
        ", ".join(
            f"{verdict}: {found.count(verdict)}"
            for verdict in (GUARDED, STOPPED, UNKNOWN, UNGUARDED)
        )
    )
