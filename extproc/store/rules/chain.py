"""Chains: conversations without names, identified by their history; the rule of `chain.lua`.

- A **node** stands for all assistant messages in the history of a request. It has the entries of
  all requests up to there, copied from its parent, so branches share only what they have in common.
- Its **parent** is the node with the longest known history without the newest messages.
- A **suffix** stands for the last two assistant messages of a node. It continues a conversation
  whose client drops the oldest messages, so that no parent is known. It takes precedence over
  parents from before the previous turn. It is ambiguous if several conversations end alike.

Conversations that are equal so far share one node, which counts them in `runs`; each child takes
over one of them. An entry is empty if its result differs between these conversations.

An equal request is a retry. After `MAX_RETRIES`, it is a turn of a client that shows only its last
messages, but only if its conversation is known from another node: first requests of runs with the
same examples are equal, too. A store that has started anew knows only some of the runs that stand
at a node, so the node's conversation must also be known since its first request.

A window of two turns shares only one turn with the next one. So this turn alone is a suffix, too,
called the **answer**. Equal runs side by side send equal windows, so each window replaces the
answer's entries. Only a turn that equals the one before it makes them longer each time: once, then
after `MAX_RETRIES` for each conversation that stands there, and then once for all of them. While
several conversations stand there, others that arrive leave the answer the shorter history.

A whole history of two turns looks like a window of an equal run that is longer. If its parent was
left, it is taken for such a window only if a conversation has passed the answer since the node was
last asked for. Otherwise it is a retry, which changes nothing.

If names are requested, each conversation has one. A request without history gets a fresh name,
which is queued at its node. A child takes the oldest name in the queue of its parent, or else of
its suffix. If both are empty, an equal request is a
retry: it gets the names in the queue of its node, in turn. Any other request begins a conversation
    with a fresh name. If
only an ambiguous suffix is known, there is no name.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from extproc.store.rules.ring import split_records

MAX_ENTRIES: Final = 32
MAX_RETRIES: Final = 3
_MAX_RUNS: Final = 255
_MOST_SENT_AGAIN: Final = 2
"""This many conversations may stand at an answer because one has sent its requests again."""

CUT_MS: Final = 120_000
"""Lifetime of a node after all of its conversations have left it, because one may return."""

FIRST_MS: Final = 600_000
"""Lifetime of a node that may never have a child: a conversation's first, or an unlinked one."""

MAX_NAMES: Final = 32
"""Maximum number of names in the queue of a node; the oldest are dropped."""

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
_WHOLE, _AMBIGUOUS, _DROPPED, _NAMED, _CONTINUED = 1, 2, 4, 8, 16
_NAME: Final = 8
_NONE: Final = bytes(_NAME)


class ChainLink(NamedTuple):
    """One turn of a conversation; all keys end in the caller's two hex digits.

    Attributes:
        key: key of the request's node.
        parents: keys of possible parents, longest history first; empty for a request without
            history.
        near: how many of these lack only messages of the newest turn.
        before: key of the parent's suffix, or of its answer if there is one; empty if it has fewer
            than two messages.
        own: key of the node's suffix; empty if it has fewer than two messages.
        answer: key of the node's answer; empty if `own` suffices. Without `own`, it only shows that
            the next request's conversation has gone on.
        usage: key of the caller's memory usage.
        node: 8 bytes that identify the node.
        entry: up to 64 bytes, or 8 if names are requested; not used for a request without history.
        ttl_ms: lifetime of a conversation after its last request, in milliseconds.
        most: bytes that the caller may use for new conversations in `FIRST_MS`, and as many for
            continuing others.
        fresh: 8 bytes, the name of the conversation if it begins here; empty if no names are
            requested.
    """

    key: str
    parents: tuple[str, ...]
    near: int
    before: str
    own: str
    answer: str
    usage: str
    node: bytes
    entry: bytes
    ttl_ms: int
    most: int
    fresh: bytes = b""


class Trail(NamedTuple):
    """The conversation to which a turn was added.

    Attributes:
        entries: its entries, oldest first, including the new one.
        whole: whether these are complete since its first request, up to `MAX_ENTRIES`.
        dropped: nothing was stored, because the caller uses too much memory.
        name: 8 bytes; empty if it is unknown, or if no names are requested.
    """

    entries: list[bytes]
    whole: bool
    dropped: bool
    name: bytes = b""


class _Knot:
    """The state of a node, of a suffix, or of an answer.

    Attributes:
        flags: whether it is whole, ambiguous, or known from another node.
        last: when it was written, in milliseconds.
        life: its lifetime after that, in milliseconds.
        depth: number of all entries up to here.
        conversation: the node at which its conversation began.
        writer: the node that wrote it; itself for a node.
        next: the child that continues the conversation; other children begin one.
        runs: number of conversations that have reached it and not left it.
        retries: number of retries; for an answer, of turns that equal the one before.
        name: the newest name that reached it.
        names: the queue of names for children, oldest first.
        entries: the entries, each with a byte for its length before it.
    """

    def __init__(
        self, flags: int, depth: int, conversation: bytes, writer: bytes, entries: bytes
    ) -> None:
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

    @property
    def size(self) -> int:
        """Bytes that a caller is charged for it."""
        return OVERHEAD + _HEAD_SIZE + len(self.names) + len(self.entries)

    def add(self) -> None:
        self.runs = min(self.runs + 1, _MAX_RUNS)

    def give(self, name: bytes) -> None:
        """Add a name as the newest of the queue."""
        self.take(name)
        self.name = name
        self.names = (self.names + name)[-MAX_NAMES * _NAME :]

    def take(self, name: bytes) -> bool:
        """Remove a name from the queue; returns whether it was there."""
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
    node = _read(read, asked.key, now)
    last, before, parent_key, parent, continued = _find_base(read, asked, now)
    linked = before is not None and parent is None and not before.flags & _AMBIGUOUS
    base = before if linked else parent
    continued |= node is not None and node.flags & _CONTINUED != 0
    retried = (
        before is not None
        and parent is not None
        and node is not None
        and before.last < node.last
        and asked.answer not in ("", asked.before)
    )
    is_new = begins = node is None
    name, comes, forks = (
        _find_name(node, parent, before, asked) if asked.fresh else (b"", False, False)
    )
    changed: dict[str, _Knot] = {}
    ours = b""
    if not asked.parents:
        node = _begin(node, asked)
    elif before is not None and asked.answer and not retried:
        node = _go_on(node, before, asked)
        changed[asked.before] = before
    elif node is not None and (forks or _is_retry(node, base, asked.entry)):
        counts = not retried and continued and (base is None or base.flags & _WHOLE != 0)
        ours = b"" if forks else _repeat(node, before, asked, counts=counts)
    else:
        node, ours, begins, changed = _advance(node, parent_key, parent, before, asked, now)
    node.add()
    node.flags |= _CONTINUED if continued else 0
    if comes:
        for key, knot in ((parent_key, parent), (asked.before, before)):
            if knot is not None and knot.take(name):
                changed[key] = knot
    if name and (comes or node.names):  # the names in the queue take turns at retries
        node.give(name)
    node.last = now
    changed[asked.key] = node
    ends = {} if retried else _make_ends(read, {asked.before: last}, node, asked, now)
    cost = sum([knot.size for knot in (node, *ends.values())])
    changed |= ends
    dropped = is_new and not _charge(read, write, asked, cost, now, begins=begins)
    if not dropped:
        for key, knot in changed.items():
            write(key, knot.pack(), knot.life)
    return Trail(split_entries(ours or node.entries), node.flags & _WHOLE != 0, dropped, name)


def _find_base(
    read: Read, asked: ChainLink, now: int
) -> tuple[_Knot | None, _Knot | None, str, _Knot | None, bool]:
    """What a request continues.

    Returns:
        the value of `before`, this again if it is a suffix or an answer to continue, key and node
        of the parent, and whether one of these shows that a conversation has continued. An answer
        comes with a parent if the request may also be a retry of a whole history of two turns.
    """
    last = _read(read, asked.before, now)
    # Equal requests may have written it, in which the last answers are equal, too
    continued = last is not None and not (
        last.depth <= 1 and last.writer == asked.node and asked.before in (asked.own, asked.answer)
    )
    known = last is not None and continued and asked.own != "" and not last.flags & _AMBIGUOUS
    if asked.answer:
        known = known and not asked.fresh
    before = last if known or (continued and not asked.answer) else None
    left_key, left = "", None
    for key in asked.parents[: asked.near] if known else asked.parents:
        parent = _read(read, key, now)
        if parent is None:
            continue
        if (
            asked.answer
            and before is not None
            and parent.runs == 0
            and parent.conversation == before.conversation
        ):
            left_key, left = key, parent
        else:
            return last, None if asked.answer else before, key, parent, True
    return last, before, left_key, left, continued


def _find_name(
    node: _Knot | None, parent: _Knot | None, before: _Knot | None, asked: ChainLink
) -> tuple[bytes, bool, bool]:
    """The conversation's name, if known; whether it reaches the node now; whether it forks."""
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


def _go_on(node: _Knot | None, before: _Knot, asked: ChainLink) -> _Knot:
    """Continue a conversation that is known by its answer; returns its node."""
    entries, depth, runs = before.entries, before.depth + 1, max(before.runs, 1)
    most = min(MAX_RETRIES * runs, _MAX_RUNS - 1)
    if asked.before != asked.answer:
        before.retries -= before.retries // runs  # its share
        before.runs = runs - 1
    elif before.retries > most:
        before.retries -= runs - 1
    else:
        if before.retries > 0:
            entries, depth = b"".join(split_records(entries, 0)[:-1]), before.depth
        before.retries += 1
    entries = _add(entries, asked.entry)
    made = _Knot(before.flags, depth, before.conversation, asked.node, entries)
    made.life = min(FIRST_MS, asked.ttl_ms)
    if node is not None:
        made.next, made.runs, made.name, made.names = node.next, node.runs, node.name, node.names
    return made


def _is_retry(node: _Knot, base: _Knot | None, entry: bytes) -> bool:
    """Whether a request whose node exists is a retry, not an equal conversation."""
    if base is None or base.runs == 0:
        return True
    return (
        node.retries < MAX_RETRIES
        and _leave_common(node.entries, _add(base.entries, entry)) == node.entries
    )


def _advance(  # noqa: PLR0913  # all that is known
    stood: _Knot | None,
    parent_key: str,
    parent: _Knot | None,
    before: _Knot | None,
    asked: ChainLink,
    now: int,
) -> tuple[_Knot, bytes, bool, dict[str, _Knot]]:
    """Continue a conversation, or begin one.

    Returns:
        its node, its own entries, whether it begins there, and the other changed values by key.
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
        node = _Knot(
            flags, base.depth + 1, conversation, asked.node, _add(base.entries, asked.entry)
        )
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
    """The newest entries of two conversations at one node; those that differ become empty."""
    pairs = zip(split_entries(one)[::-1], split_entries(other)[::-1], strict=False)
    kept = [entry if entry == others else b"" for entry, others in pairs]
    return b"".join([bytes((len(entry),)) + entry for entry in kept[::-1]])


def _repeat(node: _Knot, before: _Knot | None, asked: ChainLink, *, counts: bool) -> bytes:
    """Count a retry or, after `MAX_RETRIES`, another turn at the same node; returns the entries.

    `counts`: it may be a turn.
    """
    if node.retries < MAX_RETRIES or not counts:
        node.retries = min(node.retries + 1, MAX_RETRIES)
        # A conversation's first node has no entries.
        *older, newest = split_records(node.entries, 0) or [b""]
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


def _make_ends(
    read: Read, known: dict[str, _Knot | None], node: _Knot, asked: ChainLink, now: int
) -> dict[str, _Knot]:
    """The new suffix of a node, and its answer, by key; `known`: some values until now."""
    ends: dict[str, _Knot] = {}
    if asked.own:
        old = known[asked.own] if asked.own in known else _read(read, asked.own, now)
        ends[asked.own] = _make_suffix(old, node, asked)
    if asked.answer and asked.own:
        old = known[asked.answer] if asked.answer in known else _read(read, asked.answer, now)
        ends[asked.answer] = _make_answer(old, node, asked)
    elif asked.answer:
        ends[asked.answer] = _Knot(_AMBIGUOUS, 0, asked.node, asked.node, b"")
    for end in ends.values():
        end.last, end.life = now, asked.ttl_ms if asked.own and node.depth > 1 else node.life
    return ends


def _make_answer(old: _Knot | None, node: _Knot, asked: ChainLink) -> _Knot:
    """The new answer of a node."""
    answer = _Knot(node.flags, node.depth, node.conversation, asked.node, node.entries)
    answer.runs = 1
    if asked.before == asked.answer:
        answer.retries = 1
        if old is not None:
            answer.runs, answer.retries = max(old.runs, 1), max(old.retries, 1)
    elif old is not None:
        answer.runs = min(old.runs + 1, _MAX_RUNS)
        if old.runs > _MOST_SENT_AGAIN and old.depth < node.depth:
            answer.entries, answer.depth = old.entries, old.depth
    return answer


def _make_suffix(old: _Knot | None, node: _Knot, asked: ChainLink) -> _Knot:
    """The new suffix of a node; ambiguous if several conversations end alike."""
    mine = old is not None and old.writer == asked.node
    if old is not None and (
        old.flags & _AMBIGUOUS
        or (not mine and (old.conversation != node.conversation or old.runs > 0))
    ):
        return _Knot(_AMBIGUOUS, 0, old.conversation, old.writer, b"")
    suffix = _Knot(node.flags, node.depth, node.conversation, asked.node, node.entries)
    suffix.runs, suffix.name, suffix.names = node.runs, node.name, node.names
    if old is not None and mine:
        suffix.next = old.next
    return suffix


def _charge(  # noqa: PLR0913  # one reader
    read: Read, write: Write, asked: ChainLink, cost: int, now: int, *, begins: bool
) -> bool:
    """Charge the caller for this many bytes; returns False if that is too much."""
    most = asked.most
    if not begins:  # it replaces its parent, which expires after CUT_MS
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
    _, flags, last, life, depth, conversation, writer, following, runs, retries, name, names = (
        _unpack_head(value)
    )
    if abs(now - last) >= life:
        return None
    start = _HEAD_SIZE + names * _NAME
    knot = _Knot(flags, depth, conversation, writer, value[start:])
    knot.last, knot.life, knot.next = last, life, following
    knot.runs, knot.retries, knot.name = runs, retries, name
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
    return Trail(
        split_entries(answer[start:]), flags & _WHOLE != 0, flags & _DROPPED != 0, answer[1:start]
    )
