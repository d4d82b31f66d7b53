"""Trees of agents: which agent of a session sends a request, and which session is at the root.

Claude Code and Codex name the root in every request. opencode names each agent's parent: the root of an agent is that of its
parent. The store finds it at an agent's first request to a replica, in the step that counts the request. From then on, the
replica knows it.
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
    """The agent that sends a request, as its head tells.

    Attributes:
        key: limit key by which agents are named.
        name: its name; empty for the session itself.
        parent: the name of the agent that started it; empty if the session did.
        hangs: the session's name is that of its parent, which may be an agent.
    """

    key: str
    name: str
    parent: str
    hangs: bool


NO_AGENT: Final = WireAgent("", "", "", False)
"""Of a request in which nothing names an agent."""


_Key: TypeAlias = tuple[Descriptor, str]
"""A limit key that may name an agent, and the header that it is; empty if it is none."""


class _Form(NamedTuple):
    """How agents are named below sessions that one limit key names."""

    key: str
    agent: list[_Key]
    parent: list[_Key]
    hangs: bool


def _compile(agent: Sequence[str], parent: Sequence[str], *, hangs: bool) -> _Form:
    return _Form(agent[0], _list_keys(agent), _list_keys(parent), hangs)


def _list_keys(keys: Sequence[str]) -> list[_Key]:
    plain = HttpRequest.read_header
    found = compile_descriptors(list(keys))
    return [(each, each.argument if each.read is plain and each.argument != "host" else "") for each in found]


class AgentNames:
    """The limit keys that name agents, by the limit key that names their session.

    Attributes:
        same: limit keys with values that name the same sessions as those of another one.
    """

    def __init__(self, session: Session) -> None:
        """Compile a policy's keys, or those of known clients."""
        keys = session.list_budget_keys()
        if session.agent_keys is not None:
            own, parents = session.agent_keys, session.parent_keys or []
            self._forms = {key: _compile(own, parents, hangs=key in parents) for key in keys}
        else:
            known = {f"{HEADER}:{form.root}": form for form in AGENTS}
            self._forms = {
                key: _compile([f"{HEADER}:{form.agent}"], [f"{HEADER}:{form.parent}"], hangs=form.parent == form.root)
                for key, form in known.items()
                if key in keys
            }
        self.same = {key: form.key for key, form in self._forms.items() if form.hangs}

    def list_keys(self) -> list[Descriptor]:
        """The descriptors that may name an agent."""
        return [key for form in self._forms.values() for key, _ in (*form.agent, *form.parent)]

    def read(self, request: HttpRequest, key: str, session: str) -> WireAgent:
        """The agent that sends a request, given the limit key that names its session, and the value of that."""
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
        if header:  # nearly always; most requests do not have it
            value = request.read_header(header) if header in request.headers else ""
        else:
            value = key.read(request, key.argument)
        if value:
            return value
    return ""


class Roots:
    """The roots of agents whose requests name only their parents, as far as this replica knows them.

    All names are hashes of sessions' names, 16 hex digits.
    """

    def __init__(self, policy: str, idle_seconds: int, *, namespace: str) -> None:
        """Every key in the store starts with the namespace. Roots are kept for a day, or longer if sessions are."""
        self._start = f"{namespace}root:{policy}:"
        self._ttl_ms = min(max(idle_seconds * 1000, _DAY_MS), _MAX_MS)
        self._known: Memo[tuple[str, str], str] = Memo(_ROOTS)

    def find(self, tenant: str, session: str) -> str:
        """The root of an agent; empty if unknown."""
        return self._known.get((tenant, session)) or ""

    def keep(self, tenant: str, session: str, root: str) -> None:
        """Keep the root of an agent."""
        self._known.put((tenant, session), root)

    def make_search(self, scope: str, tenant: str, agent: str, parent: str) -> RootSearch:
        """The store's question about an agent, whose root is kept there, too."""
        start, end = f"{self._start}{scope}:", f":{tenant}"
        return RootSearch(f"{start}{agent}{end}", f"{start}{parent}{end}", bytes.fromhex(parent), self._ttl_ms)


def digest_agent(name: str) -> bytes:
    """The digest of an agent, given the hash of its name; `ROOT` for an empty one."""
    return bytes.fromhex(name) if name else ROOT
