"""Tests through a door of Loopguard, as its users come: a port, a command, a store's server."""
