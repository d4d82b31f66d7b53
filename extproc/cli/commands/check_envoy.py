"""`loopguard check-envoy`: reports harmful settings in an Envoy configuration, route by route."""

from __future__ import annotations

import argparse
import sys

from extproc.cli.commands import load_policies, read_headers
from extproc.cli.envoy_check.findings import CODES
from extproc.errors import UsageError
from extproc.logs import write_json
from extproc.operator.admin.client import open_clients
from extproc.options import make_type, parse_integer

HELP = "report what an Envoy configuration guards, and which settings would cause problems"
EXAMPLES = f"""examples:
  loopguard check-envoy envoy.yaml
  loopguard check-envoy --policy policies/ --admin http://127.0.0.1:9901
  istioctl proxy-config all POD -o json | loopguard check-envoy --json /dev/stdin
  loopguard check-envoy --policy policies/ --probe https://gateway.example -H "authorization: $KEY"

exit code: 0 no findings (there may be notes), 1 findings or unguarded requests,
2 the configuration cannot be read

findings:
{chr(10).join(f"  {code:<17}{meaning}" for code, meaning in CODES.items())}"""

_SIZE = make_type(parse_integer(0))


def add_flags(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="bootstrap, config dump or xDS resources, as YAML or JSON",
    )
    source.add_argument(
        "--admin",
        metavar="URL",
        help="admin page of a running Envoy, such as http://127.0.0.1:9901",
    )
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="PATH",
        help="policies that will be loaded: check only what they need",
    )
    parser.add_argument(
        "--uploads",
        type=_SIZE,
        default=10 * 2**20,
        metavar="BYTES",
        help="largest body that must pass (default 10485760)",
    )
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="NAME",
        help="the filter that calls Loopguard (default: each that mentions it)",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="CODE",
        help="ignore this finding or request; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    probe = parser.add_argument_group(
        "probe", "send marked requests through a live gateway; they reach the upstream"
    )
    probe.add_argument(
        "--probe",
        action="append",
        default=[],
        metavar="URL",
        help=(
            "URL of a listener; without a path, the paths of --policy and of guarded routes are "
            "probed; repeatable"
        ),
    )
    probe.add_argument(
        "--loopguard",
        action="append",
        metavar="URL|unix:/PATH",
        help=(
            "admin port of each Loopguard behind the gateway; repeatable (default: as in "
            "`loopguard doctor`)"
        ),
    )
    probe.add_argument(
        "-H",
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="header to send, such as a credential; repeatable",
    )
    probe.add_argument(
        "--probe-size",
        type=_SIZE,
        default=2 * 2**20,
        metavar="BYTES",
        help="size of the large body (default 2097152)",
    )


def run(options: argparse.Namespace) -> int:
    from rich.console import Console  # noqa: PLC0415  # only this command needs it

    # As above: yaml and the service's parts
    from extproc.cli.envoy_check.config import find_resources  # noqa: PLC0415
    from extproc.cli.envoy_check.document import fetch_dump, read_file  # noqa: PLC0415
    from extproc.cli.envoy_check.inspect import inspect  # noqa: PLC0415
    from extproc.cli.envoy_check.needs import find_needs  # noqa: PLC0415
    from extproc.cli.envoy_check.show import make_json, print_report  # noqa: PLC0415
    from extproc.cli.probe import is_guarded, list_names, list_paths, print_results, probe  # noqa: PLC0415

    if options.file == "":
        raise UsageError("the file's name is empty")
    if not (options.file or options.admin or options.probe):
        raise UsageError("name a FILE, --admin URL or --probe URL")
    known = [*CODES, *list_names()]
    if unknown := sorted(set(options.ignore) - set(known)):
        raise UsageError(
            f"--ignore {unknown[0]} is neither a finding nor a request; known: {', '.join(known)}"
        )
    policies = load_policies(options.policy) if options.policy else None
    report, source = None, options.admin or options.file
    if source:
        document = fetch_dump(options.admin) if options.admin else read_file(options.file)
        report = inspect(
            find_resources(document),
            find_needs(policies, options.uploads),
            options.filter,
            options.ignore,
        )
    results = []
    if options.probe:
        paths = list_paths(policies, report)
        clients = open_clients(options.loopguard, "--loopguard")
        results = probe(
            options.probe, paths, clients, read_headers(options.header), options.probe_size
        )
    if options.json:
        found = make_json(report, source) if report is not None else {}
        print(
            write_json(
                {
                    **found,
                    **({"probes": [result.describe() for result in results]} if results else {}),
                },
                indent=2,
            )
        )
    else:
        console = Console(highlight=False, markup=False, file=sys.stdout)
        if report is not None:
            print_report(report, source, console)
        if results:
            print_results(results, console)
    return int(
        (report is not None and not report.is_good)
        or (bool(options.probe) and not is_guarded(results, options.ignore))
    )
