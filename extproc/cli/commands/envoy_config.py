"""`loopguard envoy-config`: prints an Envoy bootstrap."""

from __future__ import annotations

import argparse
import sys

from extproc import options
from extproc.cli.commands import add_policy_flag, load_policies, print_warnings
from extproc.cli.envoy_config.options import EnvoyOptions
from extproc.cli.envoy_config.render import render_bootstrap
from extproc.cli.envoy_config.snippet import find_unseen, render_snippet
from extproc.policy.presets import DEFAULT_PRESET, find_preset

HELP = "print an Envoy bootstrap that guards the policies' routes, or the parts for an existing one"
EXAMPLES = """examples:
  loopguard envoy-config --policy policies/ --upstream 127.0.0.1:8080 > envoy.yaml
  loopguard envoy-config --policy policies/ --snippet --routes chat,search
  loopguard envoy-config --snippet --shadow-mode partial

The last one is for `loopguard serve` without a policy: it guards the paths of the preset agents."""


_OTHER_HTTPS = 8443


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_policy_flag(parser, required=False)
    options.add_flags(parser, EnvoyOptions)


def run(given: argparse.Namespace) -> int:
    policies = load_policies(given.policy or [find_preset(DEFAULT_PRESET)])
    chosen = options.read_options(EnvoyOptions, vars(given))
    sys.stdout.write(
        render_snippet(policies, chosen) if chosen.snippet else render_bootstrap(policies, chosen)
    )
    if (
        chosen.upstream is not None
        and chosen.upstream.port == _OTHER_HTTPS
        and not chosen.speaks_tls
    ):
        print_warnings(
            [f"port {_OTHER_HTTPS} usually speaks TLS, and Envoy will not; add --upstream-tls"]
        )
    acting = policies.list_acting()
    if not acting:
        print_warnings(["no policy has loop_detection enabled, so this guards nothing"])
    if chosen.routes and (unseen := find_unseen(policies, chosen.routes)):
        print_warnings(
            [f"these policies select by routes that are not in --routes: {', '.join(unseen)}"]
        )
    steering = (
        policies.list_steering() if chosen.body_mode == "tolerant" or chosen.tolerant_routes else []
    )
    if steering:
        told = (
            f"on tolerant routes, notes of {', '.join(steering)} become warnings, which no "
            "model reads"
        )
        print_warnings([f"{told}; --body-mode duplex has no limit either, and adds them"])
    enforcing = [policy.id for policy in acting if policy.spec.mode == "enforce"]
    if chosen.shadow_mode == "partial" and enforcing and given.policy:
        print_warnings(
            [
                (
                    f"these policies would act: {', '.join(enforcing)}; start Loopguard with serve "
                    "--shadow"
                )
            ]
        )
    return 0
