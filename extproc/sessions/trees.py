"""Trees of agents: which agent of a session sends a request, and which session is at the root.

Claude Code and Codex name the root in every request. opencode names each agent's parent: the root of an agent is that of its
parent. The store finds it at an agent's first request to a replica, in the step that counts the request. From then on, the
replica knows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from extproc.bounded import Memo
from extproc.request.clients import AGENTS
from extproc.request.fingerprint import sum_up
from extproc.request.http import Descriptor, HttpRequest, compile_descriptors
from extproc.request.limit_keys import HEADER
from extproc.sessions.names import LONGEST_KNOWN, hash_session
from extproc.sessions.session_limits import Session
from extproc.store.rules.root import RootSearch
from extproc.store.rules.tree import ROOT

_ROOTS: Final = 4_096
_DAY_MS: Final = 86_400_000
_MAX_MS: Final = 2**32 - 1


class WireAgent:
    """The agent that sends a request, as its head tells; never changed.

    Attributes:
        key: limit key by which agents are named.
        name: its name; empty for the session itself.
        parent: the name of the agent that started it; empty if the session did.
        hangs: the session's name is that of its parent, which may be an agent.
    """

    __slots__ = ("hangs", "key", "name", "parent")

    def __init__(self, key: str, name: str, parent: str, *, hangs: bool) -> None:
        self.key = key
        self.name = name
        self.parent = parent
        self.hangs = hangs


NO_AGENT: Final = WireAgent("", "", "", hangs=False)
"""Of a request in which nothing names an agent."""


class _Key:
    """A limit key that may name an agent.

    Attributes:
        descriptor: that reads it.
        header: the header that it is; empty if it is none.
    """

    __slots__ = ("descriptor", "header")

    def __init__(self, descriptor: Descriptor) -> None:
        self.descriptor = descriptor
        plain = descriptor.read is HttpRequest.read_header and descriptor.argument != "host"
        self.header = descriptor.argument if plain else ""


class _Form:
    """How agents are named below sessions that one limit key names."""

    __slots__ = ("agent", "hangs", "key", "parent")

    def __init__(self, agent: Sequence[str], parent: Sequence[str], *, hangs: bool) -> None:
        self.agent = [_Key(key) for key in compile_descriptors(list(agent))]
        self.parent = [_Key(key) for key in compile_descriptors(list(parent))]
        self.key = agent[0]
        self.hangs = hangs


class AgentNames:
    """The limit keys that name agents, by the limit key that names their session.

    Attributes:
        same: limit keys with values that name the same sessions as those of another one.
    """

    __slots__ = ("_forms", "same")

    def __init__(self, session: Session) -> None:
        """Compile a policy's keys, or those of known clients."""
        keys = session.list_budget_keys()
        if session.agent_keys is not None:
            own, parents = session.agent_keys, session.parent_keys or []
            self._forms = {key: _Form(own, parents, hangs=key in parents) for key in keys}
        else:
            known = {f"{HEADER}:{form.root}": form for form in AGENTS}
            self._forms = {
                key: _Form([f"{HEADER}:{form.agent}"], [f"{HEADER}:{form.parent}"], hangs=form.parent == form.root)
                for key, form in known.items()
                if key in keys
            }
        self.same = {key: form.key for key, form in self._forms.items() if form.hangs}

    def list_keys(self) -> list[Descriptor]:
        """The descriptors that may name an agent."""
        return [key.descriptor for form in self._forms.values() for key in (*form.agent, *form.parent)]

    def read(self, request: HttpRequest, key: str, session: str) -> WireAgent:
        """The agent that sends a request, given the limit key that names its session, and the value of that."""
        form = self._forms.get(key)
        if form is None:
            return NO_AGENT
        name = _read_first(form.agent, request)
        if not name or name == session:
            return NO_AGENT
        if form.hangs:
            return WireAgent(form.key, name, session, hangs=True)
        parent = _read_first(form.parent, request)
        return WireAgent(form.key, name, "" if parent == session else parent, hangs=False)


def _read_first(keys: Sequence[_Key], request: HttpRequest) -> str:
    for key in keys:
        if key.header:  # nearly always; most requests do not have it
            value = request.read_header(key.header) if key.header in request.headers else ""
        else:
            value = key.descriptor.read(request, key.descriptor.argument)
        if value:
            return value
    return ""


class Roots:
    """The roots of agents whose requests name only their parents, as far as this replica knows them.

    All names are hashes of sessions' names, 16 hex digits.
    """

    __slots__ = ("_known", "_start", "_ttl_ms")

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


class AgentId:
    """What distinguishes an agent from others of its caller; never changed.

    Attributes:
        name: hash of its name, 16 hex digits.
        digest: the same, 8 bytes.
        checksum: of that.
    """

    __slots__ = ("checksum", "digest", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.digest = digest_agent(name)
        self.checksum = sum_up(name) if name else 0


ROOT_ID: Final = AgentId("")
"""Of a session itself."""

_IDS: Final[Memo[tuple[str, str], AgentId]] = Memo(2_048)


def identify_agent(key: str, value: str) -> AgentId:
    """Identify an agent by the limit key that names it, and its value."""
    known = _IDS.get((key, value))
    if known is None:
        known = AgentId(hash_session(key, value))
        if len(value) <= LONGEST_KNOWN:
            _IDS.put((key, value), known)
    return known
