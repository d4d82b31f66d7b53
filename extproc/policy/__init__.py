"""Policies: the format of bundles, and how they are read and checked."""
# interpreted, with all below: runs at start and at reload; compiled classes do not keep the
# annotations that pydantic reads
