"""What a store keeps, and the rule by which each kind of state changes: in Python, and beside it in Lua for Redis and Valkey.

| rule | state | its value in Redis |
|---|---|---|
| `tally` | a count in a window, `sliding_ttl` or `fixed` | packed |
| `sliding_log` | the times of the requests in a window | a list of decimal numbers, the end of the cooldown first |
| `ring` | the newest entries of a key | packed |
| `chain` | a conversation by what its requests show | packed |
| `take_back` | requests that their upstream failed, taken back | those of `tally`, `sliding_log` and `chain` |
| `session` | what a session has used up, and how many a tenant has begun | packed |
| `documents` | documents by name, each until its end | a sorted set, a hash and a string |

The Python of `tally` and `sliding_log` is in `windows.py`, that of the others under their names.

The rules are pure and exact, in whole milliseconds, with `now` as an argument. Both languages answer the same: one set of cases
drives the memory store, which uses the Python, and Redis and Valkey, which use the Lua.

Every packed value in Redis begins with a byte for the version of its format. A value of another version is treated as if
nothing were there, so it is overwritten. Two versions of Loopguard share a store while an upgrade is under way. So a new format
gets a new version and a new key: else the two would take turns in forgetting what the other one has counted. What is not packed
(a list, a hash, a secret) has its version in its key. In memory no value outlives its process, so it needs none.
"""
# interpreted: reads files

from importlib.resources import files


def read_script(name: str) -> str:
    """The Lua of a rule."""
    return (files(__name__) / f"{name}.lua").read_text(encoding="utf-8")
