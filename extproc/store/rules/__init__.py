"""The kinds of state in a store, and their rules, in Python and (for Redis and Valkey) in Lua.

| rule | state | its value in Redis |
|---|---|---|
| `tally` | a count in a window, `sliding_ttl` or `fixed` | packed |
| `sliding_log` | the times of requests in a window | a list of decimals, the cooldown's end first |
| `back_to_back` | the newest requests of a key, with their ends | packed |
| `ring` | the newest entries of a key | packed |
| `chain` | a conversation, recognized by the history in its requests | packed |
| `take_back` | removes requests whose upstream failed | of `tally`, `sliding_log` and `chain` |
| `session` | the usage of a session, and the number of sessions of a caller | packed |
| `tree` | the agents below a session; a part of `session` | packed |
| `root` | the root of an agent that names its parent; part of `roots` and `session` | a digest |
| `budget` | buckets, periods of the calendar, breakers at a rate of spending | packed |
| `documents` | named documents with an expiry | a sorted set, a hash and a string |

The Python of `tally` and `sliding_log` is in `windows.py`; the other modules have the rules' names.

The rules are pure and exact, in whole milliseconds, with `now` as an argument. Both languages give
the same answers: one set of cases tests the memory store, which uses the Python, and Valkey, which
uses the Lua (`tests/doors/store/rules`). There, `test_every_kind.py` compares every server with
memory on random questions of all kinds.

Every packed value in Redis begins with a byte for the version of its format. A value of another
version is treated as missing, so it is overwritten. During an upgrade, two versions of Loopguard
share a store. So a new format needs a new version and a new
key: else each would discard what the other has counted. Values that are not packed (a list, a hash,
    a secret) have their
version in the key. In memory no value outlives its process, so it needs none.
"""
# interpreted: reads files

from importlib.resources import files


def read_script(name: str) -> str:
    """The Lua of a rule."""
    return (files(__name__) / f"{name}.lua").read_text(encoding="utf-8")
