"""What policies need from Envoy; without policies, what any policy could need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from extproc.ext_proc.judging import HOLD_MARGIN_MS
from extproc.policy.bundle import MAX_DELAY_MS, LoopDetection, Selector, Spec
from extproc.policy.loader import PolicySet
from extproc.request.secrets import CREDENTIAL, list_places


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of policies.

    Attributes:
        known: whether policies were given.
        uploads: the largest body that must pass, in bytes.
        hold: the longest delay of a throttled request, in seconds; 0 if none is throttled.
        warns: whether some requests are forwarded with a warning.
        steers: ids of policies that add notes to requests.
        keys: limit keys, including those of `first_of` and of labels.
        required: the keys without an alternative.
        selectors: selectors of enabled policies, by id.
        outcomes: whether a policy depends on the cost or the errors of responses.
        usage: whether a policy limits the cost.
    """

    known: bool
    uploads: int
    hold: float
    warns: bool
    keys: Sequence[str]
    selectors: Sequence[tuple[str, Selector]]
    outcomes: bool = False
    usage: bool = False
    steers: Sequence[str] = ()
    required: Sequence[str] = ()

    def reads(self, source: str) -> bool:
        """Whether a limit key has this prefix."""
        return any(key.startswith(source) for key in self.keys)

    def requires(self, source: str) -> bool:
        """Whether a limit key without an alternative has this prefix."""
        return any(key.startswith(source) for key in self.required)

    def list_headers(self) -> list[str]:
        """The headers that may identify callers."""
        places = [
            place
            for key in self.keys
            for place in (list_places("") if key == CREDENTIAL else (key,))
        ]
        return list(
            dict.fromkeys(
                [place.removeprefix("header:") for place in places if place.startswith("header:")]
            )
        )

    @property
    def names_routes(self) -> bool:
        return any(selector.routes for _, selector in self.selectors)


def find_needs(policies: PolicySet | None, uploads: int) -> Needs:
    """The needs of these policies; None for any policies."""
    if policies is None:
        hold = (MAX_DELAY_MS + HOLD_MARGIN_MS) / 1000
        return Needs(
            known=False, uploads=uploads, hold=hold, warns=True, keys=["ip:address"], selectors=()
        )
    acting = policies.list_acting()
    enforced = [
        loop
        for policy in acting
        if policy.spec.mode == "enforce"
        for _, loop in policy.spec.detectors()
    ]
    holds = [
        loop.max_delay_ms + HOLD_MARGIN_MS for loop in enforced if "throttle" in _list_actions(loop)
    ]
    staged = [
        stage
        for policy in acting
        if policy.spec.mode == "enforce"
        for stage in list_stages(policy.spec)
    ]
    holds += [int(delay) + HOLD_MARGIN_MS for action, delay in staged if action == "throttle"]
    return Needs(
        known=True,
        uploads=uploads,
        hold=max(holds, default=0) / 1000,
        warns=any(loop.adds_notes or "warn" in _list_actions(loop) for loop in enforced)
        or any(staged),
        keys=[key for policy in acting for key in policy.spec.list_sources()],
        selectors=[(policy.id, policy.spec.selector) for policy in acting],
        outcomes=policies.needs_answers(),
        usage=policies.needs_usage(),
        steers=policies.list_steering(),
        required=[
            key for policy in acting for key in policy.spec.all_limit_keys() if isinstance(key, str)
        ],
    )


def list_stages(spec: Spec) -> list[tuple[str, float]]:
    """The actions of a policy's budgets before they are used up, each with its delay in ms."""
    stages = [
        stage
        for rule in spec.list_budget_rules()
        for stage in rule.algorithm_config.get("staged_actions", ())
    ]
    return [
        (stage["action"], stage.get("delay_ms") or 0)
        for stage in stages
        if stage["action"] != "reject"
    ]


def _list_actions(loop: LoopDetection) -> set[str]:
    return {loop.action, *loop.escalate.model_dump(exclude_none=True)}
