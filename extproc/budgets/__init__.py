"""Budgets: the policy keys `rules`, `fallback_limit` and `circuit_breaker`."""
