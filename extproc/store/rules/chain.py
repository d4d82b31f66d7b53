"""Chains: conversations identified by the history that requests show, a ring of entries at each point; the rule of `chain.lua`.

A request shows a number of assistant messages. Its node stands for all of them. Its parent is the longest known node of
those that stand for all but the newest; but if only nodes from before the previous turn are known, its link goes first. A
node has the entries of all requests on the way to it, copied from its parent, so conversations that branch share only what
they have in common. Conversations that are equal so far share one node, which counts them; each child takes over one of
them. An entry is empty if its result differs between these conversations.

If names are requested, each conversation has one. A request without history gets a fresh name, which waits at its node. A child
takes over the oldest name that waits at its parent, or else at its link. If none waits there, an equal request is a retry: it
gets the names that wait at its node, in turn. Any other request begins a conversation with a fresh name. If several
conversations end alike, and nothing else is known, there is no name.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from extproc.store.rules.ring import split_records

MAX_ENTRIES: Final = 32
MAX_RETRIES: Final = 3
_MAX_RUNS: Final = 255

CUT_MS: Final = 120_000
"""How long a node is kept after all of its conversations have left it: one may return."""

FIRST_MS: Final = 600_000
"""How long a node is kept that may never have a child: a conversation's first, or one in a window of messages."""

MAX_NAMES: Final = 32
"""Maximum number of names that wait at a node; the newest are kept."""

OVERHEAD: Final = 128
"""Bytes that a caller is charged for a key, beside its value."""

_VERSION: Final = 2
_HEAD: Final = struct.Struct(">BBQII8s8s8sBB8sB")
_USAGE: Final = struct.Struct(">BBQIQ")
_HEAD_SIZE: Final = _HEAD.size
_pack_head: Final = _HEAD.pack  # compiled code calls a module's constant faster than a method
_unpack_head: Final = _HEAD.unpack_from
_pack_usage: Final = _USAGE.pack
_unpack_usage: Final = _USAGE.unpack
_unpack_times: Final = struct.Struct(">xxQI").unpack_from
_WHOLE, _AMBIGUOUS, _DROPPED, _NAMED = 1, 2, 4, 8
_NAME: Final = 8
_NONE: Final = bytes(_NAME)


class ChainLink(NamedTuple):
    """One turn of a conversation that has no name; all keys end in the two hex digits that the caller's other keys end in.

    Attributes:
        key: of the request's node.
        parents: keys of nodes without the newest assistant messages, longest history first; none for a request that shows none.
        near: how many of these lack only messages of the newest turn.
        before: key of the parent's last two assistant messages; empty where it has fewer.
        own: key of the node's last two; empty where it has fewer.
        usage: key of what the caller takes up.
        node: 8 bytes that tell the node from others.
        entry: up to 64 bytes, or 8 if names are asked for; none of a request that shows no assistant message.
        ttl_ms: how long after its last request a conversation is forgotten, in milliseconds.
        most: in `FIRST_MS` the caller may begin conversations of this many bytes, and go on with others for as many.
        fresh: 8 bytes, the name of the conversation if it begins here; empty where no names are asked for.
    """

    key: str
    parents: tuple[str, ...]
    near: int
    before: str
    own: str
    usage: str
    node: bytes
    entry: bytes
    ttl_ms: int
    most: int
    fresh: bytes = b""


class Trail(NamedTuple):
    """What a chain answers.

    Attributes:
        entries: of the conversation, the oldest first, the new one included.
        whole: they are all that there were since its first request, up to `MAX_ENTRIES`.
        dropped: nothing was kept, because the caller takes up too much.
        name: of the conversation, 8 bytes; empty where nothing tells which it is, or no names are asked for.
    """

    entries: list[bytes]
    whole: bool
    dropped: bool
    name: bytes = b""


class _Knot:
    """What stands at a node, or at a suffix.

    Attributes:
        flags: whether it is whole, or ambiguous.
        last: when it was written, in milliseconds.
        life: until it is forgotten, in milliseconds.
        depth: entries on the way here.
        conversation: to which it belongs.
        writer: the node; of a node itself, its own.
        next: the child that goes on with the conversation; others begin one.
        runs: conversations that stand here and have not gone on.
        retries: so far.
        name: the newest that came here.
        names: those that wait for a child, the oldest first.
        entries: each with a byte for its length before it.
    """

    def __init__(self, flags: int, depth: int, conversation: bytes, writer: bytes, entries: bytes) -> None:
        self.flags = flags
        self.last = 0
        self.life = 0
        self.depth = depth
        self.conversation = conversation
        self.writer = writer
        self.next = _NONE
        self.runs = 0
        self.retries = 0
        self.name = _NONE
        self.names = b""
        self.entries = entries

    def pack(self) -> bytes:
        head = _pack_head(
            _VERSION,
            self.flags,
            self.last,
            self.life,
            self.depth,
            self.conversation,
            self.writer,
            self.next,
            self.runs,
            self.retries,
            self.name,
            len(self.names) // _NAME,
        )
        return head + self.names + self.entries

    def add(self) -> None:
        self.runs = min(self.runs + 1, _MAX_RUNS)

    def give(self, name: bytes) -> None:
        """Add a name, or note that it is here again."""
        self.take(name)
        self.name = name
        self.names = (self.names + name)[-MAX_NAMES * _NAME :]

    def take(self, name: bytes) -> bool:
        """Remove a name that goes on from here, if it is here."""
        for at in range(0, len(self.names), _NAME):
            if self.names[at : at + _NAME] == name:
                self.names = self.names[:at] + self.names[at + _NAME :]
                return True
        return False


Read = Callable[[str], bytes | None]
"""Returns the value of a key, or None."""

Write = Callable[[str, bytes, int], None]
"""Keeps a value under a key for a number of milliseconds."""


def follow(read: Read, write: Write, asked: ChainLink, now: int) -> Trail:
    """Add a turn to its conversation; `now` in milliseconds."""
    node, before = _read(read, asked.key, now), _read(read, asked.before, now)
    known = before is not None and not before.flags & _AMBIGUOUS
    parent_key, parent = _find_parent(read, asked.parents[: asked.near] if known else asked.parents, now)
    own = before if asked.own == asked.before else _read(read, asked.own, now)
    linked = known and parent is None
    is_new = begins = node is None
    name, comes, forks = _find_name(node, parent, before, asked) if asked.fresh else (b"", False, False)
    changed: dict[str, _Knot] = {}
    ours = b""
    if not asked.parents:
        node = _begin(node, asked)
    elif node is not None and (forks or _is_again(node, before if linked else parent, asked.entry)):
        ours = b"" if forks else _repeat(node, before, asked)
    else:
        node, ours, begins, changed = _go_on(node, parent_key, parent, before, asked, now)
    node.add()
    if comes:
        for key, knot in ((parent_key, parent), (asked.before, before)):
            if knot is not None and knot.take(name):
                changed[key] = knot
    if name and (comes or node.names):  # those that wait here have retries in turn
        node.give(name)
    node.last = now
    changed[asked.key] = node
    cost = OVERHEAD + _HEAD_SIZE + len(node.names) + len(node.entries) if is_new else 0
    if asked.own:
        suffix = _make_suffix(own, node, asked)
        suffix.last, suffix.life = now, asked.ttl_ms if node.depth > 1 else node.life
        changed[asked.own] = suffix
        cost *= 2
    dropped = is_new and not _charge(read, write, asked, cost, now, begins=begins)
    if not dropped:
        for key, knot in changed.items():
            write(key, knot.pack(), knot.life)
    return Trail(split_entries(ours or node.entries), node.flags & _WHOLE != 0, dropped, name)


def _find_parent(read: Read, parents: tuple[str, ...], now: int) -> tuple[str, _Knot | None]:
    """The first of these keys that has a node, and the node; None if there is none."""
    for key in parents:
        knot = _read(read, key, now)
        if knot is not None:
            return key, knot
    return "", None


def _find_name(node: _Knot | None, parent: _Knot | None, before: _Knot | None, asked: ChainLink) -> tuple[bytes, bool, bool]:
    """The name of a request's conversation, empty if unknown; whether it reaches the node now; and whether it is a fork."""
    if parent is not None and parent.names:
        return parent.names[:_NAME], True, False
    link = before if parent is None else None
    if link is not None and link.names:
        return link.names[:_NAME], True, False
    if node is not None and asked.parents:
        *_, newest = split_entries(node.entries) or [b""]
        if newest and newest[:1] == asked.entry[:1] and newest != asked.entry:
            return asked.entry, True, True
        last = b"" if node.name == _NONE else node.name
        return node.names[:_NAME] or last, False, False
    if link is not None and link.flags & _AMBIGUOUS:
        return b"", False, False
    return asked.fresh, True, False


def _begin(node: _Knot | None, asked: ChainLink) -> _Knot:
    if node is None:
        node = _Knot(_WHOLE, 0, asked.node, asked.node, b"")
        node.life = min(FIRST_MS, asked.ttl_ms)
    return node


def _is_again(node: _Knot, base: _Knot | None, entry: bytes) -> bool:
    """Whether a request whose node exists is a retry; otherwise, another conversation, equal so far, reaches the node."""
    if base is None or base.runs == 0:
        return True
    return node.retries < MAX_RETRIES and _leave_common(node.entries, _add(base.entries, entry)) == node.entries


def _go_on(  # noqa: PLR0913  # all that is known
    stood: _Knot | None, parent_key: str, parent: _Knot | None, before: _Knot | None, asked: ChainLink, now: int
) -> tuple[_Knot, bytes, bool, dict[str, _Knot]]:
    """Continue a conversation, or begin one that is seen for the first time.

    Returns:
        its node, the entries that are its own, whether it begins there, and what else has changed.
    """
    claims = parent is not None and parent.runs > 0
    linked = before is not None and parent is None and not before.flags & _AMBIGUOUS
    base = before if linked else parent
    changed: dict[str, _Knot] = {}
    if base is None:
        node, begins = _Knot(0, 1, asked.node, asked.node, _add(b"", asked.entry)), True
    else:
        begins = base.next not in (_NONE, asked.node)
        conversation = asked.node if begins else base.conversation
        flags = base.flags if claims or linked else 0
        node = _Knot(flags, base.depth + 1, conversation, asked.node, _add(base.entries, asked.entry))
        if not begins:
            base.next = asked.node
        changed[asked.before if linked else parent_key] = base
        if not linked and before is not None and before.writer == base.writer:
            changed[asked.before] = before
    for knot in changed.values():
        knot.runs = max(knot.runs - 1, 0)
        if knot.runs == 0:
            knot.last, knot.life = now, min(CUT_MS, asked.ttl_ms)
    shown = node.entries
    node.life = asked.ttl_ms if base is not None and not linked else min(FIRST_MS, asked.ttl_ms)
    if stood is not None:
        begins = False
        node.conversation, node.next, node.runs = stood.conversation, stood.next, stood.runs
        node.retries = stood.retries if linked else 0
        node.name, node.names = stood.name, stood.names
        if node.depth == stood.depth:
            node.entries = _leave_common(stood.entries, shown)
    return node, shown, begins, changed


def _leave_common(one: bytes, other: bytes) -> bytes:
    """The entries that two conversations at one node have in common; entries that differ become empty."""
    pairs = zip(split_entries(one)[::-1], split_entries(other)[::-1], strict=False)
    kept = [entry if entry == others else b"" for entry, others in pairs]
    return b"".join([bytes((len(entry),)) + entry for entry in kept[::-1]])


def _repeat(node: _Knot, before: _Knot | None, asked: ChainLink) -> bytes:
    """Note a request that was there before; returns its entries."""
    if node.retries < MAX_RETRIES:
        node.retries += 1
        *older, newest = split_records(node.entries, 0) or [b""]  # a conversation's first node has none
        entries = _add(b"".join(older), asked.entry)
        if len(newest) > 1:
            node.entries = entries
        return entries
    goes_on = (
        before is not None
        and not before.flags & _AMBIGUOUS
        and before.conversation == node.conversation
        and before.depth > node.depth
    )
    base = before if before is not None and goes_on else node
    node.entries, node.depth = _add(base.entries, asked.entry), base.depth + 1
    return node.entries


def _make_suffix(old: _Knot | None, node: _Knot, asked: ChainLink) -> _Knot:
    """The value for the last two messages of a node; ambiguous if several conversations end with them."""
    mine = old is not None and old.writer == asked.node
    if old is not None and (old.flags & _AMBIGUOUS or (not mine and (old.conversation != node.conversation or old.runs > 0))):
        return _Knot(_AMBIGUOUS, 0, old.conversation, old.writer, b"")
    suffix = _Knot(node.flags, node.depth, node.conversation, asked.node, node.entries)
    suffix.runs, suffix.name, suffix.names = node.runs, node.name, node.names
    if old is not None and mine:
        suffix.next = old.next
    return suffix


def _charge(read: Read, write: Write, asked: ChainLink, cost: int, now: int, *, begins: bool) -> bool:  # noqa: PLR0913  # one reader
    """Charge the caller for this many bytes; returns False if that is too much."""
    most = asked.most
    if not begins:  # it replaces its parent, which goes after a while
        cost, most = cost * CUT_MS // FIRST_MS, 2 * most
    life: int
    value = read(asked.usage)
    started, used = now, 0
    if value is not None and len(value) == _USAGE.size and value[0] == _VERSION:
        _, _, started, life, used = _unpack_usage(value)
        if abs(now - started) >= life:
            started, used = now, 0
    if used + cost > most:
        return False
    life = min(FIRST_MS, asked.ttl_ms)
    write(asked.usage, _pack_usage(_VERSION, 0, started, life, used + cost), life)
    return True


def ends_at(value: bytes) -> int:
    """When a value expires, in milliseconds; all kinds of values begin alike."""
    last: int
    life: int
    last, life = _unpack_times(value)
    return last + life


def _read(read: Read, key: str, now: int) -> _Knot | None:
    """Unpack the value of a key; None if there is none, or it has expired."""
    value = read(key) if key else None
    if value is None or len(value) < _HEAD_SIZE or value[0] != _VERSION:
        return None
    last: int
    life: int
    names: int
    _, flags, last, life, depth, conversation, writer, following, runs, retries, name, names = _unpack_head(value)
    if abs(now - last) >= life:
        return None
    start = _HEAD_SIZE + names * _NAME
    knot = _Knot(flags, depth, conversation, writer, value[start:])
    knot.last, knot.life, knot.next, knot.runs, knot.retries, knot.name = last, life, following, runs, retries, name
    if names:
        knot.names = value[_HEAD_SIZE:start]
    return knot


def _add(entries: bytes, entry: bytes) -> bytes:
    count = at = 0
    while at < len(entries):
        at += 1 + entries[at]
        count += 1
    start = 0
    for _ in range(MAX_ENTRIES - 1, count):
        start += 1 + entries[start]
    return entries[start:] + bytes((len(entry),)) + entry


def split_entries(joined: bytes) -> list[bytes]:
    """The entries of a ring.

    Raises:
        IndexError: they are malformed.
    """
    entries = []
    start, length = 0, len(joined)
    while start < length:
        end = start + 1 + joined[start]
        if end > length:
            raise IndexError
        entries.append(joined[start + 1 : end])
        start = end
    return entries


def read_trail(answer: bytes) -> Trail:
    """Read a script's answer: a byte of flags, the name if there is one, and the entries.

    Raises:
        IndexError: it is malformed.
    """
    flags = answer[0]
    start = 1 + _NAME if flags & _NAMED else 1
    return Trail(split_entries(answer[start:]), flags & _WHOLE != 0, flags & _DROPPED != 0, answer[1:start])
