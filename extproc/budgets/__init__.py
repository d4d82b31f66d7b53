"""Budgets: how much a caller may use over time, as `rules`, `fallback_limit` and `circuit_breaker` of a policy say."""
