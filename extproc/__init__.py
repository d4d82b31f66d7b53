"""Loopguard: an Envoy external processor that stops runaway agents."""
