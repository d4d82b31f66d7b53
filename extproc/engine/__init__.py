"""Runs one request through its policies."""
