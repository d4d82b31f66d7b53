"""Each rule in both of its languages: the same cases through the memory store and through real servers."""
