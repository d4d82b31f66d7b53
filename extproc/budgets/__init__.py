"""Budgets: what a caller may use over time, from the policy keys `rules`, `fallback_limit` and `circuit_breaker`."""
