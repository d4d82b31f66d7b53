"""Every metric. No label has a value that a client chooses."""
# interpreted: only names counters; prometheus-client takes the rest of the time

from __future__ import annotations

from collections import Counter as Counted
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from extproc.tallies import Buckets

_PREFIX = "loopguard"
_MAX_FILES = 100
"""Maximum number of refused files that get their own series."""

_LATENCY_BUCKETS = (
    0.000025,
    0.00005,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1.0,
)
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

Decisions: TypeAlias = dict[tuple[str, ...], int]
"""Requests by policy, mode and action, or by more.

Only the event loop writes; the thread that answers scrapes only reads.
"""

Counts: TypeAlias = tuple[Sequence[str], float]


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self) -> None:  # noqa: PLR0915  # one statement per metric
        # The start times of counters are not worth a second time series
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, namespace=_PREFIX, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, namespace=_PREFIX, registry=registry)

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Buckets:
            buckets = Buckets(bounds)
            registry.register(_Shown(lambda: _show_buckets(f"{_PREFIX}_{name}", text, buckets)))
            return buckets

        def decided(
            name: str, text: str, labels: Sequence[str] = ("policy", "mode", "action")
        ) -> Decisions:
            decisions: Decisions = {}
            self.show_counts(name, text, labels, lambda: decisions.copy().items())
            return decisions

        self.decisions = decided("requests_total", "Requests that a policy counted, by action")
        self.loops = decided("loops_detected_total", "Counted requests that were part of a loop")
        by_detector = ("policy", "detector", "mode", "action", "strength")
        text = (
            "Requests that were part of a loop, by detector and strength (strong, weak, or empty)"
        )
        self.detections = decided("detections_total", text, by_detector)
        by_change = ("policy", "detector", "mode", "cause", "arm", "after")
        text = "Loops that got a first note (begun) or would have (arm not_noted), and the outcome"
        self.after_notes = counter("after_notes_total", text, *by_change)
        self.compared_exactly = counter(
            "compared_exactly_total", "Bodies that canonical compared byte for byte", "policy"
        )
        self.unmatched = counter("unmatched_total", "Requests that no policy matched")
        self.uncounted = counter(
            "uncounted_total", "Matched requests that could not be counted", "policy", "reason"
        )
        text = "Requests whose Mcp-Method or Mcp-Name disagrees with the body"
        self.header_mismatch = counter("header_mismatch_total", text, "policy")
        text = "Requests that got a warning instead of a note"
        self.unsteered = counter("unsteered_total", text, "policy", "reason")
        text = "Requests refused by uncountable: reject"
        self.uncountable_rejected = counter("uncountable_rejected_total", text, "policy", "reason")
        self.kill_switched = counter(
            "kill_switched_total",
            "Requests that a kill switch refused, or would have refused",
            "scope_key",
            "mode",
        )
        self.overrides = gauge("overrides", "Active overrides", "kind")
        self.overridden = counter(
            "overridden_total",
            "Requests that a block or kill refused, or an allow let through",
            "policy",
            "mode",
            "kind",
        )
        text = "Requests that lacked one of a policy's limit keys"
        self.missing_descriptor = counter("missing_descriptor_total", text, "policy", "key")
        self.decision_seconds = histogram(
            "decision_seconds",
            "Time from message to answer, without delays by throttle",
            _LATENCY_BUCKETS,
        )
        self.throttled_in_flight = gauge(
            "throttled_in_flight", "Throttled requests that are delayed now"
        )
        self.streams_in_flight = gauge("streams_in_flight", "Open ext_proc streams")
        self.overload = counter(
            "overload_total", "Requests let through because --max-streams was reached"
        )
        text = (
            "1 while a store server (by address) is in use, 0 while replicas count its keys "
            "themselves"
        )
        self.store_up = gauge("store_up", text, "shard")
        self.store_errors = counter(
            "store_errors_total",
            "Store errors: unavailable and timeout are uncounted requests, other kinds are causes",
            "kind",
        )
        self.store_seconds = histogram(
            "store_seconds", "Time that requests waited for the store", _LATENCY_BUCKETS
        )
        self.store_batch_size = histogram(
            "store_batch_size", "Hits and turns in one round trip to the store", _BATCH_BUCKETS
        )
        self.store_entries = gauge("store_entries", "Entries in the memory store")
        self.store_evictions = counter(
            "store_evictions_total", "Live entries that the full memory store dropped"
        )
        text = "Turns not kept because their caller takes up too much of the store"
        self.chains_dropped = counter("chains_dropped_total", text)
        self.events = counter("events_total", "Events for other programs, by result", "result")
        self.policy_reloads = counter("policy_reloads_total", "Policy reloads, by result", "result")
        self.policy_reload_refused = gauge(
            "policy_reload_refused",
            "1 while policy files have errors and the last good policies are in force",
        )
        self.list_refused_files: Callable[[], list[str]] = list
        text = "1 for each policy file, or path, whose content on disk is refused"
        self.show_counts(
            "policy_file_refused",
            text,
            ("file",),
            lambda: [((file,), 1) for file in self.list_refused_files()[:_MAX_FILES]],
            GaugeMetricFamily,
        )
        self.enforce_percent = gauge(
            "policy_enforce_percent",
            "Percentage of the callers that a policy acts on, if not all",
            "policy",
        )
        self.policy_expired = gauge(
            "policy_expired", "Expired policy files that are still in force"
        )
        self.list_unenforced: Callable[[], list[tuple[str, str]]] = list  # (policy, part) of each
        text = "Parts of bundles that are not enforced (--allow-unenforced)"
        self.show_counts(
            "unenforced",
            text,
            ("policy", "part"),
            lambda: Counted(self.list_unenforced()).items(),
            GaugeMetricFamily,
        )
        self.policy_info = gauge(
            "policy_info", "1 for each policy file in force", "bundle_version", "sha256", "file"
        )
        self.fail_open = counter(
            "fail_open_total", "Requests let through because Loopguard could not decide", "reason"
        )
        self.handover_errors = counter(
            "handover_errors_total",
            "Requests whose route named an unknown policy or carried an unusable one",
            "reason",
        )
        self.tls_reloads = counter(
            "tls_reloads_total", "TLS certificate reloads, by result", "result"
        )
        self.tls_not_after = gauge(
            "tls_not_after_seconds", "Expiry of the TLS certificate in use, in seconds since 1970"
        )
        self.tls_refused = counter(
            "tls_refused_total", "Connections refused in the TLS handshake (transport fast)"
        )
        self.access_log_entries = counter(
            "access_log_entries_total",
            "Access log entries about session requests; unknown: no session waits for it; missing: "
            "back_to_back waits for it in vain",
            "result",
        )
        by_limit = ("policy", "mode", "limit", "action")
        self.session_limits = counter(
            "session_limits_total", "Requests that reached a limit of their session", *by_limit
        )
        text = (
            "Requests in sessions that end sooner, because their callers begin more than "
            "max_sessions_per_tenant"
        )
        self.session_overflow = counter("session_overflow_total", text, "policy")
        text = "Agents that sessions with limits of agents have started"
        self.session_agents = counter("session_agents_total", text, "policy", "mode")
        text = "Requests without a session under policies with session_limits"
        self.session_unnamed = counter("session_unnamed_total", text, "policy", "mode")
        text = "Callers whose session key changes with every request and names no session"
        self.session_changing = counter("session_changing_total", text, "policy", "key")
        by_rule = ("policy", "mode", "rule")
        text = (
            "Requests that reached a stage of a budget, or that a budget refused or would have "
            "refused"
        )
        self.budgets = counter("budgets_total", text, *by_rule, "reason", "action")
        text = "Usage of budgets by responses, in the rule's unit, from Envoy's access log"
        self.budget_used = counter("budget_used_total", text, *by_rule)
        text = "Amounts that were reserved for these responses"
        self.budget_estimated = counter("budget_estimated_total", text, *by_rule)
        self.store_emptied = counter(
            "store_emptied_total", "Times that the store was found to have lost its keys"
        )
        text = "Reservations of refused requests, and settlements, that failed in the store"
        self.budget_lost = counter("budget_lost_total", text)
        text = "Responses with more tokens than any model can use; an estimate is charged instead"
        self.absurd_usage = counter("absurd_usage_total", text)
        text = (
            "Replicas with budgets that share the store, as last seen; without it, each "
            "enforces its share. 0: not counted"
        )
        self.replicas = gauge("replicas", text)
        text = "Requests from which used-up tools could not be removed"
        self.unnarrowed = counter("unnarrowed_total", text, "policy", "reason")
        self._create_series()

    def _create_series(self) -> None:
        """Create series for alerts at startup: `increase` misses the event that creates one."""
        for reason in ("internal_error", "store_error", "shadow_error", "sent_on"):
            self.fail_open.labels(reason)
        for reason in ("invalid", "too_large", "unenforced", "unknown_policy"):
            self.handover_errors.labels(reason)
        for result in ("taken", "dropped", "unknown", "error", "missing"):
            self.access_log_entries.labels(result)
        for result in ("sent", "dropped"):
            self.events.labels(result)
        for result in ("ok", "error"):
            self.policy_reloads.labels(result)
            self.tls_reloads.labels(result)

    def show_counts(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        read: Callable[[], Iterable[Counts]],
        kind: type[CounterMetricFamily | GaugeMetricFamily] = CounterMetricFamily,
    ) -> None:
        """Export numbers counted elsewhere: scrapes `read` pairs of (label values, number)."""

        def show() -> Metric:
            shown = kind(f"{_PREFIX}_{name}", text, labels=labels)
            for values, count in read():
                shown.add_metric(values, count)
            return shown

        self.registry.register(_Shown(show))


class _Shown(Collector):
    def __init__(self, show: Callable[[], Metric]) -> None:
        self._show = show

    def collect(self) -> Iterable[Metric]:
        return [self._show()]

    describe = collect  # the registry needs the names


def _show_buckets(name: str, text: str, buckets: Buckets) -> Metric:
    bounds = [*map(floatToGoString, buckets.bounds), "+Inf"]
    counts = [float(count) for count in accumulate(buckets.counts)]
    return HistogramMetricFamily(name, text, list(zip(bounds, counts, strict=True)), buckets.sum)
