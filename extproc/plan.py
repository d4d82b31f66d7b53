"""One policy, ready to run: what of it does not depend on the request is worked out once, at the load."""

from __future__ import annotations

from extproc.fingerprint import is_too_long
from extproc.guards.loop import Detector
from extproc.policy.bundle import BODY, UNSUPPORTED_KEYS, Bypass, Policy
from extproc.policy.routes import is_below
from extproc.request import MAX_DESCRIPTOR, HttpRequest, compile_descriptors
from extproc.similarity.document import Document, NotCounted, NotJson, find, steps


class Plan:
    """A policy with its guards."""

    def __init__(self, policy: Policy, *, shadow: bool) -> None:
        """Compile."""
        spec = policy.spec
        self.id = policy.id
        self.selector = spec.selector
        self.shadow = shadow
        self.mode = "shadow" if shadow else "enforce"
        self.detectors = [Detector(policy.id, name, loop, shadow=shadow) for name, loop in spec.detectors()]
        self._bypass = spec.bypass
        self._skip_missing = spec.missing_descriptor == "skip"
        read = compile_descriptors([key for key in spec.all_limit_keys() if key not in UNSUPPORTED_KEYS])
        self._descriptors = [descriptor for descriptor in read if descriptor.source != BODY]
        self._body_descriptors = [(item.name, steps(item.argument)) for item in read if item.source == BODY]
        self.reads_body = bool(self._body_descriptors)
        self.needs_body = self.reads_body or any(detector.needs_body for detector in self.detectors)
        self.needs_whole = self.reads_body or any(detector.similarity.whole for detector in self.detectors)
        looking = [detector.max_inspect_bytes for detector in self.detectors if self.reads_body or detector.looks]
        self.inspects = max(looking, default=0)

    def read_descriptors(self, request: HttpRequest) -> list[tuple[str, str]]:
        """The caller's descriptors by name, those in the body excepted.

        Raises:
            NotCounted: the policy does not count such a request.
        """
        if self._bypass and any(_bypasses(entry, request) for entry in self._bypass):
            raise NotCounted("bypass")
        if is_too_long(request.target, request.query):
            raise NotCounted("target_too_long")
        values = []
        for descriptor in self._descriptors:
            value = descriptor.read(request, descriptor.argument)
            if len(value) > MAX_DESCRIPTOR:
                raise NotCounted("descriptor_too_long")
            if value:
                values.append((descriptor.name, value))
            elif self._skip_missing:
                raise NotCounted("missing_descriptor")
        return values

    def read_body_descriptors(self, document: Document) -> list[tuple[str, str]]:
        """The descriptors that stand in the body.

        Raises:
            NotCounted: as `read_descriptors`.
        """
        try:
            value = document.value()
        except NotJson:
            value = None
        found = [(name, find(value, pointer)) for name, pointer in self._body_descriptors]
        if any(len(text) > MAX_DESCRIPTOR for _, text in found):
            raise NotCounted("descriptor_too_long")
        if self._skip_missing and not all(text for _, text in found):
            raise NotCounted("missing_descriptor")
        return [(name, text) for name, text in found if text]


def _bypasses(entry: Bypass, request: HttpRequest) -> bool:
    """Whether a request has all that an entry of `bypass` names; of two paths either."""
    if entry.header is not None and entry.header not in request.headers:
        return False
    if entry.methods is not None and request.method not in entry.methods:
        return False
    if entry.pathExact is None and entry.pathPrefix is None:
        return True
    return request.path == entry.pathExact or (entry.pathPrefix is not None and is_below(request.path, entry.pathPrefix))
