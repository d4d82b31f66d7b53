"""One policy, ready to run: what of it does not depend on the request is worked out once, at the load."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.fingerprint import is_too_long
from extproc.guards.loop import Detector
from extproc.guards.session import Sessions
from extproc.policy.bundle import BODY, UNSUPPORTED_KEYS, Bypass, Policy
from extproc.policy.routes import is_below
from extproc.request import MAX_DESCRIPTOR, HttpRequest, compile_descriptors
from extproc.similarity.document import Document, NotCounted, NotJson, find, split_pointer


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
        self._missing = spec.missing_descriptor
        self.refuses_uncountable = spec.uncountable == "reject"
        read = compile_descriptors([key for key in spec.all_limit_keys() if key not in UNSUPPORTED_KEYS])
        self.tells_callers_apart = bool(read)
        self._descriptors = [descriptor for descriptor in read if descriptor.source != BODY]
        self._body_descriptors = [(item, split_pointer(item.argument)) for item in read if item.source == BODY]
        self.reads_body = bool(self._body_descriptors)
        self.needs_body = self.reads_body or any(detector.needs_body for detector in self.detectors)
        self.sessions: Sessions | None = None
        if spec.session is not None and any(detector.similarity.remembers for detector in self.detectors):
            self.sessions = Sessions(policy.id, spec.session, shadow=shadow)
        in_body = self.reads_body or (self.sessions is not None and self.sessions.reads_body)
        self.needs_whole = in_body or any(detector.similarity.whole for detector in self.detectors)
        looking = [detector.max_inspect_bytes for detector in self.detectors if self.reads_body or detector.looks]
        self.inspects = max(looking, default=0)

    def read_descriptors(self, request: HttpRequest, missing: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """The caller's descriptors by name, those in the body excepted.

        Args:
            request: the caller's.
            missing: takes (policy, limit key) of what the request does not have.

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
            else:
                missing.append((self.id, descriptor.key))
        if len(values) < len(self._descriptors):
            self._check_missing(values, may_follow=self.reads_body)
        return values

    def read_session(self, request: HttpRequest) -> Sequence[str]:
        """What a request's head says about its session, for `Sessions.find`."""
        return self.sessions.read(request) if self.sessions is not None else ()

    def read_body_descriptors(
        self, document: Document, values: list[tuple[str, str]], missing: list[tuple[str, str]]
    ) -> list[tuple[str, str]]:
        """All of the caller's descriptors, those in the body among them.

        Args:
            document: the body.
            values: what `read_descriptors` returned.
            missing: as there.

        Raises:
            NotCounted: as there.
        """
        try:
            value = document.value()
        except NotJson:
            value = None
        found = [(descriptor, find(value, pointer)) for descriptor, pointer in self._body_descriptors]
        if any(len(text) > MAX_DESCRIPTOR for _, text in found):
            raise NotCounted("descriptor_too_long")
        values = [*values, *((descriptor.name, text) for descriptor, text in found if text)]
        lacking = [(self.id, descriptor.key) for descriptor, text in found if not text]
        if lacking:
            missing += [entry for entry in lacking if entry not in missing]  # several detectors read the same body
            self._check_missing(values, may_follow=False)
        return values

    def _check_missing(self, values: list[tuple[str, str]], *, may_follow: bool) -> None:
        """Some descriptor is missing.

        Args:
            values: the others.
            may_follow: one that stands in the body may make up for it.

        Raises:
            NotCounted: this policy does not count the request then.
        """
        if self._missing == "skip" or (self._missing == "require_one" and not values and not may_follow):
            raise NotCounted("missing_descriptor")


def _bypasses(entry: Bypass, request: HttpRequest) -> bool:
    """Whether a request has all that an entry of `bypass` names; of two paths either."""
    if entry.header is not None and entry.header not in request.headers:
        return False
    if entry.methods is not None and request.method not in entry.methods:
        return False
    if entry.pathExact is None and entry.pathPrefix is None:
        return True
    return request.path == entry.pathExact or (entry.pathPrefix is not None and is_below(request.path, entry.pathPrefix))
