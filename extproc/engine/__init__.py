"""Applies the policies to one request."""
