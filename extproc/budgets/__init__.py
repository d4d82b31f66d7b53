"""Budgets: what a caller may use in a time, as `rules`, `fallback_limit` and `circuit_breaker` of a policy say."""
