"""Runs recorded traffic through the same engine, by the recorded clock, to show what policies would have done to it."""
