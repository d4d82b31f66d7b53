"""Unit tests of `extproc/budgets`."""
