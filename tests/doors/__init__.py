"""Tests that go through a door of Loopguard (a port, the command, a store's server), as its users do."""
