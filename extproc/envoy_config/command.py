"""`loopguard envoy-config`: its flags, and what it prints."""

from __future__ import annotations

import argparse
import sys

from extproc import options
from extproc.envoy_config.options import EnvoyOptions
from extproc.envoy_config.render import render_bootstrap
from extproc.envoy_config.routes import find_acting
from extproc.policy.loader import PolicySet


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The policies, and one flag for each option."""
    parser.add_argument("--policy", action="append", required=True, metavar="PATH", help="policy file or directory; repeatable")
    options.add_flags(parser, EnvoyOptions)


def run(given: argparse.Namespace, policies: PolicySet) -> int:
    """Print the bootstrap.

    Returns:
        the exit code.

    Raises:
        UsageError: a flag cannot be used, or a policy selects by a route that cannot be placed.
    """
    chosen = options.read_options(EnvoyOptions, vars(given))
    sys.stdout.write(render_bootstrap(policies, chosen))
    acting = list(find_acting(policies))
    if not acting:
        sys.stderr.write("warning: no policy has loop_detection enabled, so this guards nothing\n")
    enforcing = [policy.id for policy in acting if policy.spec.mode == "enforce"]
    if chosen.shadow_mode == "partial" and enforcing:
        sys.stderr.write(f"warning: these policies would act: {', '.join(enforcing)}; start Loopguard with serve --shadow\n")
    return 0
