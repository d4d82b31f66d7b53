"""The small part of a policy that stays in memory after compilation, for comparison with others."""

from __future__ import annotations

from hashlib import blake2b

from extproc.objects import copy_text
from extproc.policy.bundle import EVERYBODY, SHADOW, Policy, Selector

_DIGEST = 8
_NO_ALIASES: dict[str, str] = {}

Texts = tuple[str, ...]


class SlimSelector:
    """A selector; None matches anything.

    Attributes:
        apis: names of APIs; None matches any path.
        exact: the exact path.
        prefixes: path prefixes, without duplicates.
    """

    __slots__ = ("apis", "exact", "hosts", "methods", "prefixes", "routes")

    def __init__(self, selector: Selector, shared: dict[Texts, Texts]) -> None:
        """Copies all texts, because slices of a document would keep its memory allocated.

        Equal lists share a copy.
        """
        self.apis = _copy(selector.list_apis() or None, shared)
        self.exact = None if selector.pathExact is None else copy_text(selector.pathExact)
        prefixes = ["/"] if selector.spans_apis() else selector.list_prefixes()
        self.prefixes = tuple([copy_text(prefix) for prefix in prefixes])
        self.hosts = _copy(selector.hosts, shared)
        self.methods = _copy(selector.methods, shared)
        self.routes = _copy(selector.routes, shared)

    def identify(self) -> tuple[object, ...]:
        """Equal for selectors that match the same requests, in any order."""
        lists = (self.apis, self.prefixes, self.hosts, self.methods, self.routes)
        return (
            self.exact,
            *[None if values is None else tuple(sorted(values)) for values in lists],
        )


def _copy(values: list[str] | None, shared: dict[Texts, Texts]) -> Texts | None:
    if values is None:
        return None
    known = shared.get(tuple(values))
    if known is None:
        known = tuple([copy_text(value) for value in values])
        shared[known] = known
    return known


class Outline:
    """The outline of a valid policy.

    Attributes:
        id: as in the file.
        mode: as in the file.
        canary_of: the policy to compare with, if named.
        percent: the percentage of callers that it acts on; 0 in shadow mode.
        enabled: it can have an effect.
        digest: of all its keys, 64 bits.
        aliases: names of callers, by hash.
    """

    __slots__ = ("aliases", "canary_of", "digest", "enabled", "id", "mode", "percent", "selector")

    def __init__(self, policy: Policy, shared: dict[Texts, Texts]) -> None:
        """Keeps no reference to the policy's own objects."""
        spec = policy.spec
        self.id = copy_text(policy.id)
        self.mode: str = spec.mode
        self.percent: int = 0 if spec.mode == SHADOW else spec.enforce_percent or EVERYBODY
        self.canary_of = None if spec.canary_of is None else copy_text(spec.canary_of)
        self.enabled = spec.is_enabled()
        text = policy.model_dump_json(exclude_defaults=True)
        self.digest = int.from_bytes(blake2b(text.encode(), digest_size=_DIGEST).digest())
        self.aliases = {
            copy_text(name): copy_text(alias) for name, alias in spec.aliases.items()
        } or _NO_ALIASES
        self.selector = SlimSelector(spec.selector, shared)
