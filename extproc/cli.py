"""The `loopguard` command."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import NoReturn

from extproc import engine, explain, presets, settings
from extproc.errors import BundleErrors, LoopguardError, UsageError
from extproc.logs import escape_controls, setup
from extproc.options import add_flags as add_options
from extproc.options import option, read_options, require_together
from extproc.policy.bundle import make_schema
from extproc.policy.loader import load
from extproc.similarity.document import limit_integers

_LOG = logging.getLogger("loopguard")

_EXAMPLES = {
    "serve": """examples:
  loopguard serve --policy policies/
  loopguard serve --policy bundle.json --listen 0.0.0.0:50051 --log-format json
  LOOPGUARD_POLICY=/etc/loopguard loopguard serve --shadow

signals: SIGHUP reloads the policies (so does any change of the files), SIGTERM drains, Ctrl-C drains without the delay""",
    "init": f"""presets:
{presets.describe_presets()}

examples:
  loopguard init > policies/agents.json
  loopguard init --preset canary > policies/canary.json && loopguard validate policies/

Change the paths, and the limit keys that tell callers apart, to yours.""",
    "validate": """examples:
  loopguard validate policies/ && git push

exit code: 0 good (warnings and notes on stderr), 1 every error on stderr as file: /json/pointer: message;
with --strict, parts of a bundle that serve would refuse without --allow-unenforced are errors as well""",
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
  loopguard healthcheck --tls-ca ca.pem --tls-cert probe.pem --tls-key probe.key --tls-server-name loopguard.example

exit code: 0 serving, 1 anything else""",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0 good, 1 failed, 2 usage."""
    limit_integers()
    try:
        options = _make_parser().parse_args(arguments)
        return int(options.run(options))
    except UsageError as error:
        return _complain(str(error), 2)
    except BundleErrors as error:
        for problem in error.errors:
            print(escape_controls(str(problem)), file=sys.stderr)
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


def _check_paths(paths: Sequence[str]) -> Sequence[str]:
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
    _check_paths(chosen.policy)
    setup(chosen.log_format, chosen.log_level)
    for warning in settings.find_unknown(os.environ):
        _LOG.warning(warning)

    async def run() -> None:
        await Server(chosen).run()

    # Our own transport gains from uvloop; grpcio brings its own poller and does not.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if chosen.transport == "fast" else None) as runner:
        runner.run(run())
    return 0


def _validate(options: argparse.Namespace) -> int:
    policies = load(_check_paths(options.path), _now())
    if policies.unenforced and options.strict:
        raise BundleErrors(policies.list_refusals())
    for warning in policies.warnings:
        print(escape_controls(f"warning: {warning}"), file=sys.stderr)
    for part in policies.unenforced:
        print(escape_controls(f"warning: {part}; serve would refuse this"), file=sys.stderr)
    for note in policies.notes:
        print(escape_controls(f"note: {note}"), file=sys.stderr)
    count = sum(len(source.policies) for source in policies.sources)
    print(f"good: {_pluralize(count, 'policy', 'policies')} in {_pluralize(len(policies.sources), 'file', 'files')}")
    return 0


def _pluralize(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _explain(options: argparse.Namespace) -> int:
    return explain.run(options, load(_check_paths(options.policy), _now()), _now())


def _print_schema(_: argparse.Namespace) -> int:
    print(json.dumps(make_schema(), indent=2))
    return 0


def _envoy_config(options: argparse.Namespace) -> int:
    from extproc.envoy_config.command import run  # noqa: PLC0415  # only this command needs it

    return run(options, load(_check_paths(options.policy), _now()))


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthcheckTls:
    """The flags of `loopguard healthcheck` for a port with mutual TLS."""

    tls_ca: str = option("", str, "authorities of the server's certificate, where the port is mutual TLS", "PATH")
    tls_cert: str = option("", str, "certificate to ask with", "PATH")
    tls_key: str = option("", str, "its private key", "PATH")
    tls_server_name: str = option("", str, "name in the server's certificate, where that is not the host", "NAME")

    def __post_init__(self) -> None:
        """Refuse half of what TLS needs.

        Raises:
            UsageError: naming what is missing.
        """
        require_together(self, ("tls_ca", "tls_cert", "tls_key"), ("tls_server_name",))


def _hush_grpc() -> None:
    """Before grpc is imported: its core would write lines of its own form to stderr, about what we report ourselves."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _healthcheck(options: argparse.Namespace) -> int:
    _hush_grpc()
    from extproc.transport.grpcio import ClientTls, check_health  # noqa: PLC0415  # grpc takes 0.2 s to import

    chosen = read_options(HealthcheckTls, vars(options))
    tls = ClientTls(chosen.tls_ca, chosen.tls_cert, chosen.tls_key, chosen.tls_server_name) if chosen.tls_ca else None
    status = check_health(options.address, options.timeout, tls)
    print(status.lower() if status == "SERVING" else status, file=sys.stdout if status == "SERVING" else sys.stderr)
    return 0 if status == "SERVING" else 1


def _find_listen_address() -> str:
    """Where this machine's server listens, as far as the environment tells."""
    text = os.environ.get(f"{settings.ENV_PREFIX}LISTEN", "127.0.0.1:50051")
    try:
        address = settings.address(text)
    except ValueError:
        return text
    if address.is_unix or address.host not in ("::", "0.0.0.0"):  # noqa: S104  # recognised, not bound
        return text
    return f"127.0.0.1:{address.port}"


def describe_version() -> str:
    """The distribution's version, and whether the hot path is machine code or the same files as plain Python."""
    made = "pure Python" if engine.__file__.endswith(".py") else "compiled"
    return f"loopguard {version('extproc-loopguard')} ({made})"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage of twenty flags in front of it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see '{self.prog} --help'")


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="loopguard", description="Stops runaway agents at the gateway: an Envoy external processor.")
    parser.add_argument("--version", action="version", version=describe_version())
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

    presets.add_flags(command("init", presets.run, "print a policy to start from"))

    validate = command("validate", _validate, "check policy files and report every error at once")
    validate.add_argument("--strict", action="store_true", help="parts that serve would refuse are errors as well")
    validate.add_argument("path", nargs="+", metavar="PATH", help="policy file or directory")

    explain.add_flags(command("explain", _explain, "show what the policies make of one request"))

    command("schema", _print_schema, "print the JSON Schema of policy files, for editors")

    envoy_config = command("envoy-config", _envoy_config, "print a complete Envoy bootstrap that guards the policies' routes")
    from extproc.envoy_config.command import add_flags  # noqa: PLC0415  # beside the command it belongs to

    add_flags(envoy_config)

    healthcheck = command("healthcheck", _healthcheck, "ask the running server's grpc.health.v1")
    healthcheck.add_argument(
        "--address",
        default=_find_listen_address(),
        metavar="HOST:PORT|unix:/PATH",
        help="default: LOOPGUARD_LISTEN, else 127.0.0.1:50051",
    )
    healthcheck.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="default 3")
    add_options(healthcheck, HealthcheckTls)
    return parser


if __name__ == "__main__":
    sys.exit(main())
