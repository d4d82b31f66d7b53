"""The detector of the preset `agents`, alone."""

import json
from pathlib import Path
from typing import Any

import extproc
from extproc.detectors import make_similarity
from extproc.engine.plan import Detector
from extproc.policy.bundle import LoopDetection

PRESET = json.loads((Path(extproc.__file__).parent / "policy/presets/agents.json").read_text())[
    "spec"
]["loop_detection"][0]


def make_detector(**more: Any) -> Detector:  # noqa: ANN401  # keys of loop_detection
    loop = LoopDetection.model_validate(PRESET | more)
    return Detector("agents", "turns", loop, make_similarity(loop), shadow=False, namespace="")


AGENTS = make_detector()
