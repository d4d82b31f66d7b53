"""Trees of agents: which agent sends a request, and which session is its root.

Claude Code and Codex name the root in every request. opencode names only an agent's parent: an
agent's root is its parent's root. The store finds it in the step that counts an agent's first
request to a replica. The replica then caches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from extproc.bounded import Memo
from extproc.request.clients import AGENTS
from extproc.request.http import Descriptor, HttpRequest, compile_descriptors
from extproc.request.limit_keys import HEADER
from extproc.sessions.session_limits import Session
from extproc.store.rules.root import RootSearch
from extproc.store.rules.tree import ROOT

_ROOTS: Final = 4_096
_DAY_MS: Final = 86_400_000
_MAX_MS: Final = 2**32 - 1


class WireAgent(NamedTuple):
    """The agent that sends a request, according to its head.

    Attributes:
        key: limit key of the agent's name.
        name: its name; empty for the session itself.
        parent: the name of the agent that started it; empty if the session did.
        hangs: the session's name is that of its parent, which may be an agent.
    """

    key: str
    name: str
    parent: str
    hangs: bool


NO_AGENT: Final = WireAgent("", "", "", False)
"""For requests that name no agent."""


_Key: TypeAlias = tuple[Descriptor, str]
"""A limit key that may name an agent, and its header; empty if it is not a header."""


class _Form(NamedTuple):
    """How agents are named in sessions that are named by one limit key."""

    key: str
    agent: list[_Key]
    parent: list[_Key]
    hangs: bool


def _compile(agent: Sequence[str], parent: Sequence[str], *, hangs: bool) -> _Form:
    return _Form(agent[0], _list_keys(agent), _list_keys(parent), hangs)


def _list_keys(keys: Sequence[str]) -> list[_Key]:
    plain = HttpRequest.read_header
    found = compile_descriptors(list(keys))
    return [
        (each, each.argument if each.read is plain and each.argument != "host" else "")
        for each in found
    ]


class AgentNames:
    """The limit keys that name agents, by the limit key that names their session.

    Attributes:
        same: maps limit keys to others that name the same sessions.
    """

    def __init__(self, session: Session) -> None:
        """Use the policy's keys or, without any, those of known clients."""
        keys = session.list_budget_keys()
        if session.agent_keys is not None:
            own, parents = session.agent_keys, session.parent_keys or []
            self._forms = {key: _compile(own, parents, hangs=key in parents) for key in keys}
        else:
            known = {f"{HEADER}:{form.root}": form for form in AGENTS}
            self._forms = {
                key: _compile(
                    [f"{HEADER}:{form.agent}"],
                    [f"{HEADER}:{form.parent}"],
                    hangs=form.parent == form.root,
                )
                for key, form in known.items()
                if key in keys
            }
        self.same = {key: form.key for key, form in self._forms.items() if form.hangs}

    def list_keys(self) -> list[Descriptor]:
        """The descriptors that may name an agent."""
        return [key for form in self._forms.values() for key, _ in (*form.agent, *form.parent)]

    def read(self, request: HttpRequest, key: str, session: str) -> WireAgent:
        """The agent that sends a request, given the session's limit key and its value."""
        form = self._forms.get(key)
        if form is None:
            return NO_AGENT
        name = _read_first(form.agent, request)
        if not name or name == session:
            return NO_AGENT
        if form.hangs:
            return WireAgent(form.key, name, session, True)
        parent = _read_first(form.parent, request)
        return WireAgent(form.key, name, "" if parent == session else parent, False)


def _read_first(keys: Sequence[_Key], request: HttpRequest) -> str:
    for key, header in keys:
        if header:  # the usual kind; most requests lack it
            value = request.read_header(header) if header in request.headers else ""
        else:
            value = key.read(request, key.argument)
        if value:
            return value
    return ""


class Roots:
    """Roots, cached in this replica, of agents whose requests name only their parents.

    All names are hashes of session names, 16 hex digits.
    """

    def __init__(self, policy: str, idle_seconds: int, *, namespace: str) -> None:
        """Every key starts with the namespace.

        The store keeps roots for a day, or longer if sessions last longer.
        """
        self._start = f"{namespace}root:{policy}:"
        self._ttl_ms = min(max(idle_seconds * 1000, _DAY_MS), _MAX_MS)
        self._known: Memo[tuple[str, str], str] = Memo(_ROOTS)

    def find(self, tenant: str, session: str) -> str:
        """The root of an agent; empty if unknown."""
        return self._known.get((tenant, session)) or ""

    def keep(self, tenant: str, session: str, root: str) -> None:
        """Cache the root of an agent."""
        self._known.put((tenant, session), root)

    def make_search(self, scope: str, tenant: str, agent: str, parent: str) -> RootSearch:
        """The store's question for an agent's root; the store keeps it, too."""
        start, end = f"{self._start}{scope}:", f":{tenant}"
        return RootSearch(
            f"{start}{agent}{end}", f"{start}{parent}{end}", bytes.fromhex(parent), self._ttl_ms
        )


def digest_agent(name: str) -> bytes:
    """The digest of an agent, given the hash of its name; `ROOT` if empty."""
    return bytes.fromhex(name) if name else ROOT
