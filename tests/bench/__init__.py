"""The benchmark.

Costs are measured beside a reference in the same run: machines differ and are noisy.
"""
