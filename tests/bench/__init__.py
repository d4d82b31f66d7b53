"""The benchmark: what the guard costs, measured beside a reference in the same run, because machines differ and are noisy."""
