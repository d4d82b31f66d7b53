"""Policies: what a bundle is, how it is read, and which policies a request meets."""
