"""All checks. Each takes a filter that asks Loopguard, with the routes on which it does, and what policies need."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from extproc.cli.envoy_check.checks import answers, callers, clusters, filters, late, limits, paths, routes
from extproc.cli.envoy_check.config import Guard, Resources
from extproc.cli.envoy_check.findings import Finding
from extproc.cli.envoy_check.needs import Needs

Check = Callable[[Guard, Needs, Resources], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    filters.check_order,
    late.check_late_routes,
    filters.check_processing_mode,
    filters.check_content_length,
    filters.check_failure_mode,
    filters.check_message_timeout,
    filters.check_answers,
    filters.check_metadata,
    filters.check_attributes,
    filters.check_claims,
    limits.check_buffer_limit,
    limits.check_http2_window,
    limits.check_told_limit,
    limits.check_request_timeout,
    limits.check_idle_timeout,
    limits.check_expect,
    callers.check_address,
    callers.check_envoy_headers,
    callers.check_marks,
    paths.check_spelling,
    paths.check_escaped_slashes,
    routes.check_client_header,
    routes.check_upgrades,
    routes.check_retries,
    routes.check_kept_bodies,
    routes.check_overrides,
    clusters.check_cluster,
    answers.check_entries,
    answers.check_usage,
)
