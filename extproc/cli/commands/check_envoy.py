"""`loopguard check-envoy`: settings in an Envoy's configuration that would cause problems, route by route."""

from __future__ import annotations

import argparse
import json
import sys

from extproc.cli.commands import load_policies
from extproc.cli.envoy_check.findings import CODES
from extproc.errors import UsageError

HELP = "report what an Envoy configuration guards, and which settings would cause problems"
EXAMPLES = f"""examples:
  loopguard check-envoy envoy.yaml
  loopguard check-envoy --policy policies/ --admin http://127.0.0.1:9901
  istioctl proxy-config all POD -o json | loopguard check-envoy --json /dev/stdin

exit code: 0 good (notes are not findings), 1 findings, 2 the configuration cannot be read

findings:
{chr(10).join(f"  {code:<17}{meaning}" for code, meaning in CODES.items())}"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("file", nargs="?", metavar="FILE", help="bootstrap, config dump or xDS resources, as YAML or JSON")
    source.add_argument("--admin", metavar="URL", help="admin page of a running Envoy, such as http://127.0.0.1:9901")
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="PATH",
        help="policies that will be loaded: check only what they need",
    )
    parser.add_argument(
        "--uploads",
        type=_parse_size,
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
    parser.add_argument("--ignore", action="append", default=[], metavar="CODE", help="ignore this finding; repeatable")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _parse_size(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number of bytes, not {text!r}")
    return int(text)


def run(options: argparse.Namespace) -> int:
    from rich.console import Console  # noqa: PLC0415  # only this command needs it

    from extproc.cli.envoy_check.config import find_resources  # noqa: PLC0415  # as above: yaml and the service's parts
    from extproc.cli.envoy_check.document import fetch_dump, read_file  # noqa: PLC0415
    from extproc.cli.envoy_check.inspect import inspect  # noqa: PLC0415
    from extproc.cli.envoy_check.needs import find_needs  # noqa: PLC0415
    from extproc.cli.envoy_check.show import make_json, print_report  # noqa: PLC0415

    if options.file == "":
        raise UsageError("the file's name is empty")
    if unknown := sorted(set(options.ignore) - set(CODES)):
        raise UsageError(f"--ignore {unknown[0]} is not a finding; known findings: {', '.join(CODES)}")
    needs = find_needs(load_policies(options.policy) if options.policy else None, options.uploads)
    source = options.admin or options.file
    document = fetch_dump(options.admin) if options.admin else read_file(options.file)
    report = inspect(find_resources(document), needs, options.filter, options.ignore)
    if options.json:
        print(json.dumps(make_json(report, source), indent=2))
    else:
        print_report(report, source, Console(highlight=False, markup=False, file=sys.stdout))
    return 0 if report.is_good else 1
