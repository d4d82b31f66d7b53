"""Policies: what a bundle is, how it is read, and which policies apply to a request."""
# interpreted, with all below: runs at start and at reload; compiled classes do not keep the annotations that pydantic reads
