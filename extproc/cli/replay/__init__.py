"""Recorded traffic through the very same engine, with the recorded clock: what policies would have done to it."""
