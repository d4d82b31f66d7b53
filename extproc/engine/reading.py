"""A request as its guards read it: its head, its body, and results that guards share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from extproc.apis import LIST_PATHS
from extproc.apis.excerpt import Excerpt
from extproc.budgets.costs import estimate_prompt
from extproc.detectors.chain import ChainPlace, read_place
from extproc.engine.plan import Plan
from extproc.request.document import Document, NotCounted
from extproc.request.fingerprint import NO_BODY, Body, name_request, write_head, write_query
from extproc.request.http import HttpRequest
from extproc.sessions.names import SessionNames

NOT_CHANGING: Final[list[tuple[str, str]]] = []


class Reading:
    """A request as its guards read it.

    The policies of a request are often alike, such as a canary and its policy, so each guard reuses
    the last guard's results. Shadow policies read after the enforcing ones.

    Attributes:
        request: the request.
        scope: attachment name.
        sums: length and checksums of the body.
        plain: the body without notes, as compared, or an excerpt of a long one; None if it cannot
            be inspected.
        unreadable: why it cannot be inspected.
        withheld: why shadow policies may not inspect it; empty if they may.
        changing: (policy, limit key) of session names just found to change with every request.
    """

    def __init__(self, request: HttpRequest, scope: str) -> None:
        self.request = request
        self.scope = scope
        self.sums = NO_BODY
        self.plain: Document | None = None
        self.unreadable = ""
        self.withheld = ""
        self.changing = NOT_CHANGING
        self._head = ""
        self._named: Body | None = None
        self._caller = ""
        self._names = ("", "", "")
        self._values: Sequence[str] | None = None
        self._looked: Document | None = None
        self._looked_in: tuple[bool, tuple[str, ...], tuple[str, ...]] = (False, (), ())
        self._session = ""
        self._placed: Document | None = None
        self._place: ChainPlace | None = None
        self._excerpt: Document | None = None
        self._most = 0  # bytes of that excerpt
        self._estimated: tuple[Document | None, int] | None = None

    @property
    def head(self) -> str:
        """The composite up to the body; see `write_head`. Computed lazily."""
        if not self._head:
            request = self.request
            query = write_query(request.read_shown_query()) if request.query else ""
            self._head = write_head(request.method, request.path, query)
        return self._head

    def name(self, sums: Body, caller: str) -> tuple[str, str, str]:
        """Composite, fingerprint and check of a request with these checksums and caller."""
        if sums is not self._named or caller != self._caller:
            self._named, self._caller = sums, caller
            self._names = name_request(self.head, sums, caller)
        return self._names

    def find_session(
        self,
        names: SessionNames,
        values: Sequence[str],
        document: Document | None,
        plan: Plan,
        caller: str,
    ) -> str:
        """See `SessionNames.find`."""
        if values is not self._values or document is not self._looked:
            looked = (
                document is self._looked
                and names.looks_in == self._looked_in
                and values == self._values
            )
            name = self._session if looked else names.find(values, document)
            self._session, self._values, self._looked, self._looked_in = (
                name,
                values,
                document,
                names.looks_in,
            )
            changing = names.watch(values, name, document, None if plan.reads_body else caller)
            if changing:
                self.changing = [*self.changing, (plan.id, changing)]
        return self._session

    def find_place(self, document: Document) -> ChainPlace | None:
        """The request's place in its conversation; None if unknown."""
        if document is not self._placed:
            self._placed, self._place = document, read_place(document)
        return self._place

    def look(self, *, shadow: bool) -> Document | None:
        """The whole body, for a guard of an enforcing or shadow policy; None if not inspected."""
        plain = self.plain
        return None if plain is None or plain.shortened or (shadow and self.withheld) else plain

    def estimate_prompt(self, document: Document | None, size: int) -> int:
        """See `costs.estimate_prompt`; each document is estimated once."""
        known = self._estimated
        if known is None or known[0] is not document:
            known = self._estimated = document, estimate_prompt(document, size)
        return known[1]

    def open(self, most: int, *, ends: bool = False, shadow: bool = False) -> Document:
        """The body, for a guard that inspects up to `most` bytes.

        Args:
            most: bytes.
            ends: return an excerpt of a longer body.
            shadow: the policy is in shadow mode.

        Raises:
            NotCounted: the body is too long or unreadable.
        """
        plain = self.plain
        if shadow and self.withheld:
            raise NotCounted(self.withheld)
        if plain is not None and len(plain) <= most and (ends or not plain.shortened):
            return plain
        if ends and plain is not None and not plain.shortened:
            if most != self._most:
                self._excerpt, self._most = (
                    make_excerpt(Excerpt(LIST_PATHS, most), bytes(plain)),
                    most,
                )
            if self._excerpt is not None:
                return self._excerpt
        raise NotCounted(self.unreadable if plain is None or plain.shortened else "inspect_limit")


def make_excerpt(excerpt: Excerpt, data: bytes | memoryview) -> Document | None:
    """The excerpt of a body; None if `Excerpt.write` makes none."""
    written = excerpt.write(data)
    return None if written is None else Document(written, shortened=True)
