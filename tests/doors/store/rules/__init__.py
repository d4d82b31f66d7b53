"""Each rule in Python and Lua: the same cases through the memory store and real servers."""
