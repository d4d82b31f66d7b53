"""Canaries: what a shadow policy would do in place of the enforcing one beside it."""
