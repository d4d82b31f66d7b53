"""The `loopguard` command."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain, repeat
from pathlib import Path
from typing import NoReturn
from urllib.parse import SplitResult, urlsplit

from extproc import settings
from extproc.engine import Engine
from extproc.errors import BundleErrors, LoopguardError, UsageError
from extproc.fingerprint import NO_BODY
from extproc.logs import one_line, setup
from extproc.plan import Entry
from extproc.policy.bundle import DEFAULT_DETECTOR, METHOD, schema
from extproc.policy.loader import load
from extproc.request import HttpRequest, unknowable_body, unverified_claims
from extproc.similarity.document import Document
from extproc.windows import Count

_LOG = logging.getLogger("loopguard")

_EXAMPLES = {
    "serve": """examples:
  loopguard serve --policy policies/
  loopguard serve --policy bundle.json --listen 0.0.0.0:50051 --log-format json
  LOOPGUARD_POLICY=/etc/loopguard loopguard serve --shadow

signals: SIGHUP reloads the policies (so does any change of the files), SIGTERM drains, Ctrl-C drains without the delay""",
    "validate": """examples:
  loopguard validate policies/ && git push

exit code: 0 good (warnings on stderr), 1 every error on stderr as file: /json/pointer: message""",
    "explain": """examples:
  loopguard explain --policy policies/ -X POST -H 'x-user-id: ann' -d '{"model": "m"}' https://api.example.com/v1/chat/completions
  loopguard explain --policy policies/ --claim org_id=org-abc -d @body.json http://localhost:10000/v1/messages""",
    "schema": """examples:
  loopguard schema > loopguard.schema.json""",
    "envoy-config": """examples:
  loopguard envoy-config --policy policies/ --upstream 127.0.0.1:8080 > envoy.yaml && envoy -c envoy.yaml""",
    "healthcheck": """examples:
  loopguard healthcheck
  loopguard healthcheck --address unix:/run/loopguard.sock

exit code: 0 serving, 1 anything else""",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0 good, 1 failed, 2 usage."""
    try:
        options = _parser().parse_args(arguments)
        return int(options.run(options))
    except UsageError as error:
        return _complain(str(error), 2)
    except BundleErrors as error:
        for problem in error.errors:
            print(one_line(str(problem)), file=sys.stderr)
        return 1
    except LoopguardError as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `loopguard schema | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _complain(message: str, code: int) -> int:
    print(f"loopguard: {message}", file=sys.stderr)
    return code


def _now() -> datetime:
    return datetime.now(UTC)


def _paths(paths: Sequence[str]) -> Sequence[str]:
    """The policy paths of a command line, of which none is empty."""
    if not all(paths):  # such as that of a shell's variable that is not set
        raise UsageError("a policy path is empty; give a policy file or a directory of them")
    return paths


def _serve(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it would end a process that cannot reload yet
    _hush_grpc()
    import uvloop  # noqa: PLC0415  # only the server needs it

    from extproc.server import Server  # noqa: PLC0415  # the server's parts take 0.3 s to import; other commands need none

    chosen = settings.read(vars(options), os.environ)
    if not chosen.policy:
        raise UsageError("serve needs --policy PATH (a policy file or a directory of them)")
    _paths(chosen.policy)
    setup(chosen.log_format, chosen.log_level)
    for warning in settings.unknown(os.environ):
        _LOG.warning(warning)

    async def run() -> None:
        await Server(chosen).run()

    # Our own transport gains from uvloop; grpcio brings its own poller and does not.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if chosen.transport == "fast" else None) as runner:
        runner.run(run())
    return 0


def _validate(options: argparse.Namespace) -> int:
    policies = load(_paths(options.path), _now())
    for notice in (*policies.warnings, *policies.unenforced):
        print(one_line(f"warning: {notice}"), file=sys.stderr)
    if policies.unenforced:
        print("serve refuses these parts unless --allow-unenforced is given", file=sys.stderr)
    count = sum(len(source.policies) for source in policies.sources)
    print(f"good: {_plural(count, 'policy', 'policies')} in {_plural(len(policies.sources), 'file', 'files')}")
    return 0


def _plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _explain(options: argparse.Namespace) -> int:
    policies = load(_paths(options.policy), _now())
    engine = Engine(policies, _now(), shadow=options.shadow)
    body = _body(options.data)
    request = _request(options, body)
    check = engine.prepare(request)
    if check is None:
        print(one_line(f"no policy matches {request.method} {request.path}: the request goes on uncounted"))
        return 0
    reason = unknowable_body(request) if check.needs_body else ""
    check.seal(None if reason else NO_BODY.plus(body), reason, body)
    for policy, detector, reason in check.left_out:
        _print_rows(
            [
                ("policy", policy),
                *([("detector", detector)] if detector not in ("", DEFAULT_DETECTOR) else []),
                ("uncounted", reason),
            ]
        )
    for sealed in (*check.enforcing, *check.shadow):
        _explain_detector(sealed, body)
    return 0


def _explain_detector(sealed: Entry, body: bytes) -> None:
    """What one detector of a policy sees in the request, and what it will do about it."""
    detector, hit = sealed.detector, sealed.hit
    rows = [("policy", f"{sealed.plan.id} ({detector.mode})")]
    if detector.name != DEFAULT_DETECTOR or detector.looks is not None:
        rows.append(("detector", f"{detector.name} ({detector.similarity})"))
    if detector.looks is not None:
        rows += zip(chain(["compared"], repeat("")), detector.looks.shown(Document(body)), strict=False)
    rows += [("composite", sealed.composite), ("fingerprint", sealed.fingerprint), ("tenant", sealed.tenant)]
    if hit is not None:
        rows.append(("key", hit.key))
    rows.append(("decision", _decision(sealed)))
    _print_rows(rows)


def _print_rows(rows: Iterable[tuple[str, str]]) -> None:
    for name, value in rows:
        print(f"{name:<12} {one_line(value)}")
    print()


def _decision(sealed: Entry) -> str:
    """What is done about this request, or about the one that reaches the threshold."""
    detector, found = sealed.detector, sealed.repeat
    if detector.stateless:
        if found is None:
            return "allow: no call of the last turn, or fewer calls than any threshold"
        state = f"{', '.join(found.tools)}: {found.count} of {found.calls} calls"
        if found.looping:
            return f"{_then(sealed)}; {state}"
        return f"allow below {found.threshold} equal calls, then {_then(sealed)}; {state}"
    return (
        f"allow {detector.threshold - 1} identical requests, then {_then(sealed)}; "
        f"window {detector.window_type}, {detector.window_seconds} s"
    )


def _then(sealed: Entry) -> str:
    """The decision on the request that reaches the threshold."""
    detector = sealed.detector
    cooldown_ms = sealed.hit.cooldown_ms if sealed.hit is not None else 0
    if sealed.repeat is not None and not sealed.repeat.looping:
        sealed.repeat = sealed.repeat._replace(count=sealed.repeat.threshold)
    outcome = detector.outcome(sealed, Count(detector.threshold, looping=True, cooldown_ms=cooldown_ms, span_ms=0))
    again = f" (Retry-After: {outcome.retry_after})" if outcome.retry_after is not None else ""
    told = {
        "reject": f"reject with {outcome.reject_status}{again}",
        "throttle": f"throttle (hold {outcome.delay_ms} ms at first)",
        "warn": "warn",
    }[outcome.action.value]
    return f"report: would {told}" if detector.shadow else told


def _body(data: str | None) -> bytes:
    if data is None:
        return b""
    if not data.startswith("@"):
        return data.encode("utf-8", "surrogateescape")
    try:
        return Path(data[1:]).read_bytes() if data != "@-" else sys.stdin.buffer.read()
    except OSError as error:
        raise UsageError(f"-d {data}: cannot be read: {error.strerror}") from None


def _url(text: str) -> SplitResult:
    """A URL as curl takes it, without its scheme or, because only policies look at it, with nothing but its path."""
    try:
        url = urlsplit(text if "://" in text else f"http://{text}")
        _ = url.port  # checked as it is read
    except ValueError as error:
        raise UsageError(f"{text!r} is not a URL: {error}") from None
    if url.scheme not in ("http", "https"):
        raise UsageError(f"{text!r} is not a URL of http or https")
    if not (url.hostname or text.startswith("/")):
        raise UsageError(f"{text!r} is not a URL: it names no host")
    if re.search(r"[\x00-\x20\x7f]", text):
        raise UsageError(f"{text!r} is not a URL: spaces and control characters are sent percent-encoded")
    return url


def _request(options: argparse.Namespace, body: bytes) -> HttpRequest:
    url = _url(options.url)
    if options.request is not None and not METHOD.match(options.request):
        raise UsageError(f"-X {options.request!r} must be an HTTP method such as POST")
    headers: dict[str, bytes] = {}
    for line in options.header:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise UsageError(f"-H {line!r} must be 'name: value'")
        headers.setdefault(name.strip().lower(), value.strip().encode("utf-8", "surrogateescape"))
    claims = {}
    if options.allow_unverified_jwt:
        claims = unverified_claims(headers.get("authorization", b"").decode("utf-8", "surrogateescape"))
    for pair in options.claim:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--claim {pair!r} must be NAME=VALUE")
        claims[name] = value
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    method = options.request or ("POST" if body else "GET")
    authority = headers.get("host", b"").decode("utf-8", "surrogateescape") or url.netloc.rpartition("@")[2]
    return HttpRequest(method, target, authority, headers, route=options.route, address=options.address, claims=claims)


def _schema(_: argparse.Namespace) -> int:
    print(json.dumps(schema(), indent=2))
    return 0


def _envoy_config(options: argparse.Namespace) -> int:
    from extproc.envoy_config import run  # noqa: PLC0415  # only this command needs it

    return run(options, load(_paths(options.policy), _now()))


def _hush_grpc() -> None:
    """Before grpc is imported: its core would write lines of its own form to stderr, about what we report ourselves."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _healthcheck(options: argparse.Namespace) -> int:
    _hush_grpc()
    from extproc.transport.grpcio import check_health  # noqa: PLC0415  # grpc takes 0.2 s to import

    status = check_health(options.address, options.timeout)
    print(status.lower() if status == "SERVING" else status, file=sys.stdout if status == "SERVING" else sys.stderr)
    return 0 if status == "SERVING" else 1


def _listen_address() -> str:
    """Where this machine's server listens, as far as the environment tells."""
    text = os.environ.get(f"{settings.ENV_PREFIX}LISTEN", "127.0.0.1:50051")
    try:
        address = settings.address(text)
    except ValueError:
        return text
    if address.is_unix or address.host not in ("::", "0.0.0.0"):  # noqa: S104  # recognised, not bound
        return text
    return f"127.0.0.1:{address.port}"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage of twenty flags in front of it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see '{self.prog} --help'")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="loopguard", description="Stops runaway agents at the gateway: an Envoy external processor.")
    parser.add_argument("--version", action="version", version=f"loopguard {version('extproc-loopguard')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, run: object, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=_EXAMPLES[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # what is misspelt is an error, not another flag
        )
        made.set_defaults(run=run)
        return made

    serve = command("serve", _serve, "run the external processor")
    settings.add_flags(serve)

    validate = command("validate", _validate, "check policy files and report every error at once")
    validate.add_argument("path", nargs="+", metavar="PATH", help="policy file or directory")

    explain = command("explain", _explain, "show what the policies make of one request")
    explain.add_argument(
        "--policy", action="append", required=True, metavar="PATH", help="policy file or directory; repeatable"
    )
    explain.add_argument("-X", "--request", metavar="METHOD", help="default GET, or POST with -d")
    explain.add_argument("-H", "--header", action="append", default=[], metavar="'NAME: VALUE'", help="repeatable")
    explain.add_argument("-d", "--data", metavar="BODY|@FILE", help="request body, @- for standard input")
    explain.add_argument("--claim", action="append", default=[], metavar="NAME=VALUE", help="a verified JWT claim; repeatable")
    explain.add_argument("--address", default="127.0.0.1", metavar="IP", help="the caller's address (default 127.0.0.1)")
    explain.add_argument("--route", default="", metavar="NAME", help="Envoy's name of the route")
    explain.add_argument("--allow-unverified-jwt", action="store_true", help="take claims from -H 'authorization: Bearer ...'")
    explain.add_argument("--shadow", action="store_true", help="as serve --shadow")
    explain.add_argument("url", metavar="URL")

    command("schema", _schema, "print the JSON Schema of policy files, for editors")

    envoy_config = command("envoy-config", _envoy_config, "print a complete Envoy bootstrap that guards the policies' routes")
    from extproc.envoy_config import add_flags  # noqa: PLC0415  # beside the command it belongs to

    add_flags(envoy_config)

    healthcheck = command("healthcheck", _healthcheck, "ask the running server's grpc.health.v1")
    healthcheck.add_argument(
        "--address",
        default=_listen_address(),
        metavar="HOST:PORT|unix:/PATH",
        help="default: LOOPGUARD_LISTEN, else 127.0.0.1:50051",
    )
    healthcheck.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="default 3")
    return parser


if __name__ == "__main__":
    sys.exit(main())
