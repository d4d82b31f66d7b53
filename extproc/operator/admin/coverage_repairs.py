"""The meaning and the repair of each reason why requests are not counted."""

from __future__ import annotations

from typing import NamedTuple

from extproc.decision import MISSING, UNREADABLE
from extproc.operator.coverage_rows import CROWDED, SHARED
from extproc.request.fingerprint import MAX_TARGET
from extproc.request.http import MAX_DESCRIPTOR


class Repair(NamedTuple):
    """The meaning of a reason, and what to change.

    Attributes:
        text: predicate about the requests; `{keys}` is replaced by the policy's limit keys.
        change: how to guard them; `{example}` is replaced by another limit key.
        key: the key of the policy's spec to change; empty if it is not in a policy.
    """

    text: str
    change: str
    key: str = ""


_REFUSE = 'refuse them: "uncountable": "reject"'
_OTHER_KEY = "name something that they have, such as {example}"

_STREAMS = Repair(
    "are streams, whose bodies do not end",
    'set "body": "ignore" in loop_detection to compare them without',
    "loop_detection",
)
_TRUNCATED = Repair(
    "have a body that is, or may be, above Envoy's buffer limit",
    (
        "raise it: per_connection_buffer_limit_bytes of the listener, or `loopguard envoy-config "
        "--buffer-limit`"
    ),
)
_TOO_LARGE = Repair(
    "got Envoy's 413, because their body is above its buffer limit", _TRUNCATED.change
)
_TOO_LONG = Repair(
    f"have a limit key above {MAX_DESCRIPTOR} characters, or a path and query above {MAX_TARGET}",
    _REFUSE,
    "uncountable",
)
_FILTER = Repair(
    "came without a body that Loopguard can inspect",
    (
        "set request_body_mode: BUFFERED in the filter's processing_mode; `loopguard check-envoy` "
        "finds such routes"
    ),
)
_SELECTOR = Repair(
    "have a body that the detector cannot use",
    'narrow the selector to the paths of the API, or use "similarity": "exact"',
    "selector",
)

UNPAID = "unpaid"
"""The reason MISSING for a budget."""

REPAIRS = {
    MISSING: Repair("have none of the policy's limit keys: {keys}", _OTHER_KEY, "limit_keys"),
    UNPAID: Repair(
        "lack a limit key of a budget, so they do not pay: {keys}",
        (
            'refuse them: "uncountable": "reject", or let them share a budget: '
            '"missing_descriptor": '
            '"share"'
        ),
        "rules",
    ),
    SHARED: Repair(
        "have none of the policy's limit keys: {keys}, so they count as one caller",
        _OTHER_KEY,
        "limit_keys",
    ),
    CROWDED: Repair(
        (
            "are in sessions that end sooner, because their callers begin more than "
            "max_sessions_per_tenant"
        ),
        (
            "a client may send a new name with each request: name a header that a conversation "
            "keeps, "
            '"session": {{"keys": [...]}}'
        ),
        "session",
    ),
    "unnamed": Repair(
        "name no session and show no conversation, so session_limits do not limit them",
        'limit them with "unnamed_limits", or name their sessions: "session": {{"keys": [...]}}',
        "session_limits",
    ),
    "no_history": Repair(
        "do not show the history of their conversation, and name no session that remembers it",
        'add what tells their conversations apart: "session": {{"keys": [...]}}',
        "session",
    ),
    "no_messages": _SELECTOR,
    "not_json": _SELECTOR,
    UNREADABLE: Repair(
        "have a body that Loopguard fails to read", "report the error, which is in the log"
    ),
    "batch": Repair("hold several requests in one", _REFUSE, "uncountable"),
    "inspect_limit": Repair(
        "have a body above max_inspect_bytes, or nested too deeply",
        "raise max_inspect_bytes, up to 16777216",
        "loop_detection",
    ),
    "inspect_budget": Repair(
        "come from a caller that has used up its inspection time",
        "run more processes, or lower max_inspect_bytes",
    ),
    "content_encoding": Repair(
        "have a body in an unknown or wrong encoding", _REFUSE, "uncountable"
    ),
    "descriptor_too_long": _TOO_LONG,
    "target_too_long": _TOO_LONG,
    "grpc": _STREAMS,
    "upgrade": _STREAMS,
    "connect": _STREAMS,
    "responses_websocket": Repair(
        "open a WebSocket for model calls",
        "have clients use HTTP: docs/policies.md#websockets",
    ),
    "body_truncated": _TRUNCATED,
    "too_large": _TOO_LARGE,
    "no_body_phase": _FILTER,
    "body_mode": _FILTER,
    "overload": Repair(
        "passed because Loopguard was full", "run more processes, or raise `serve --max-streams`"
    ),
    "shutdown": Repair("passed because Loopguard was stopping", "raise `serve --drain-timeout`"),
    "shadow_deadline": Repair(
        "were answered before the store had counted them for a shadow policy",
        "find out why the store is slow: loopguard_store_seconds",
    ),
    "internal_error": Repair(
        "passed because of an error in Loopguard", "report the error, which is in the log"
    ),
}

UNKNOWN = Repair("could not be counted", "see loopguard_uncounted_total in docs/reference.md")
UNSTEERED = Repair("got a warning instead of a note", "see docs/policies.md#steering")
