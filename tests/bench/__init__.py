"""The benchmark: costs beside those of a reference in the same run, because machines differ."""
