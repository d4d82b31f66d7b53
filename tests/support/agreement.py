"""What the gateway and `loopguard explain` decide about one conversation, with preset `agents`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import extproc.policy.presets
from extproc.engine.guards import LoopGuard
from extproc.ext_proc.service import Service
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.request.http import HttpRequest
from tests.support.engine import make_engine
from tests.support.looping import looked_into
from tests.support.messages import body, encoded, headers
from tests.support.service import decoded, exchange, make_service, metadata_of, sample

AGENTS: dict[str, Any] = json.loads(
    (Path(extproc.policy.presets.__path__[0]) / "agents.json").read_text()
)

# The number of equal turns at which the preset refuses a strong loop.
REFUSED = 7


def ask_preset(service: Service, value: object, path: str) -> ProcessingResponse:
    message = headers(path, authorization="Bearer sk-one")
    return decoded(exchange(service, message, body(encoded(value)))[-1])


def judge_live(bodies: Sequence[object], path: str) -> list[str]:
    """What the gateway decides about these requests of one caller, in `judge_alone`'s words."""
    service = make_service(AGENTS)
    verdicts = []
    for value in bodies:
        uncounted = sample(service, "uncounted_total", policy="agents", reason="no_history")
        action = str(metadata_of(ask_preset(service, value, path)).get("action", "allow"))
        later = sample(service, "uncounted_total", policy="agents", reason="no_history")
        verdicts.append("no_history" if later > uncounted else action)
    return verdicts


def judge_alone(value: object, path: str) -> str:
    """What `explain` decides about a request: an action of `turns`, or why it is not counted."""
    request = HttpRequest("POST", path, "host", {"authorization": b"Bearer sk-one"})
    evaluation = looked_into(make_engine(AGENTS), encoded(value), request)
    for _, detector, why in evaluation.list_left_out():
        if detector == "turns":
            return why
    for group in evaluation.groups:
        for candidate in group.active:
            if isinstance(candidate, LoopGuard) and candidate.detector.name == "turns":
                found = candidate.repeat
                return (
                    candidate.detector.find_action(found).value
                    if found is not None and found.looping
                    else "allow"
                )
    return "allow"
