"""Policies to start from: `loopguard init` prints them, `serve` alone watches with the first."""
# interpreted: reads files

from __future__ import annotations

from importlib.resources import files

PRESETS = ("agents", "interactive", "agentic", "webhook", "canary", "sessions")
DEFAULT_PRESET = "agents"


def find_preset(name: str) -> str:
    """The path of a preset's policy file."""
    return str(files("extproc.policy.presets") / f"{name}.json")
