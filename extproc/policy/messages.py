"""Our sentences for pydantic's errors: which field, what would be right, and what was found."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from extproc.policy import bundle
from extproc.policy.bundle import Envelope, Policy
from extproc.policy.objects import Place
from extproc.similarity.keys import Escalation, Tool

_LONGEST = 60
"""Most characters of a value that are shown."""

_Phrase: TypeAlias = Callable[[str, Mapping[str, Any]], str]
"""A sentence from a field's name and pydantic's context of the error."""


def explain(model: type[BaseModel], failure: ValidationError) -> Iterator[tuple[Place, str]]:
    """Every error of a validation: its place below the value, and our sentence for it."""
    for error in failure.errors(include_url=False):
        place = _leave_out_tags(error["loc"])
        yield place, _phrase(model, place, error)


def describe(value: object) -> str:
    """What was found, in a few words; no value of a policy file is so long that it has to be read whole."""
    if isinstance(value, list | dict):
        kind = "array" if isinstance(value, list) else "object"
        return f"an {kind}" if value else f"an empty {kind}"
    text = value if isinstance(value, str) else json.dumps(value)
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return repr(shown) if isinstance(value, str) else shown


def _leave_out_tags(place: Place) -> Place:
    """A place without what pydantic puts in beside keys: what kind of loop_detection it took, and that a key is wrong."""
    if place[:2] == ("spec", "loop_detection") and place[2:3] in ((bundle.OBJECT,), (bundle.LIST,)):
        place = (*place[:2], *place[3:])
    return place[:-1] if place[-1:] == ("[key]",) and place[-3:-2] == ("tools",) else place


def _phrase(model: type[BaseModel], place: Place, error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    name = str(place[-1]) if place and isinstance(place[-1], str) and place[-1] else "it"
    if kind == "extra_forbidden":
        return _phrase_unknown_key(model, name, place)
    if kind in _NOTHING_FOUND:
        return _NOTHING_FOUND[kind](name, context)
    if place == ("spec", "loop_detection") and kind.startswith("model"):
        right = f"{name} must be an object or an array of objects"
    else:
        right = _PHRASES[kind](name, context) if kind in _PHRASES else error["msg"]
    return f"{right}, not {describe(error['input'])}{context.get('why', '')}"


def _phrase_choices(name: str, context: Mapping[str, Any]) -> str:
    choices = str(context["expected"]).replace(" or ", ", ").replace("'", "")
    return f"{name} must be {'one of ' if ',' in choices else ''}{choices}"


def _phrase_integer(name: str, _: Mapping[str, Any]) -> str:
    kind = "a positive integer" if name in {"window_seconds", "threshold_identical_requests"} else "an integer"
    return f"{name} must be {kind}"


def _phrase_greater_than(name: str, context: Mapping[str, Any]) -> str:
    if name.endswith("_seconds"):
        return f"{name} must be a positive integer"
    return f"{name} must be greater than {context['gt']:g}"


def _say(text: str) -> _Phrase:
    return lambda name, _: f"{name} {text}"


_NOTHING_LEFT_OUT = {
    "loop_detection": "",
    "keys": " for the headers that agents send anyway",
    "ramp_by": " for the policy's limit_keys",
}
"""What leaving out a field means, where that is not that any value matches."""

_NOTHING_FOUND: dict[str, _Phrase] = {
    "missing": _say("is required"),
    "string_too_short": _say("must not be empty"),
    "string_too_long": lambda name, context: f"{name} must be at most {context['max_length']} characters",
    "too_short": lambda name, _: (
        f"{name} must not be an empty array; leave it out{_NOTHING_LEFT_OUT.get(name, ' to match any')}"
    ),
}
"""By pydantic's type of the error, where what was found goes without saying."""

_PHRASES: dict[str, _Phrase] = {
    "literal_error": _phrase_choices,
    "greater_than": _phrase_greater_than,
    "greater_than_equal": lambda name, context: f"{name} must be >= {context['ge']}",
    "less_than_equal": lambda name, context: f"{name} must be <= {context['le']}",
    "bool_type": _say("must be a boolean"),
    "int_type": _phrase_integer,
    "float_type": _say("must be a number"),
    "finite_number": _say("must be a finite number"),
    "string_type": _say("must be a string"),
    "list_type": _say("must be an array"),
    "dict_type": _say("must be an object"),
    "model_type": _say("must be an object"),
    "model_attributes_type": _say("must be an object"),
    "loopguard": lambda name, context: f"{name} {context['message']}",
}
"""By pydantic's type of the error."""

_KEYS: dict[str, Sequence[str]] = {
    "the bundle": list(Envelope.model_fields),
    "the policy": list(Policy.model_fields),
    "spec": list(bundle.Spec.model_fields),
    "spec/selector": list(bundle.Selector.model_fields),
    "spec/loop_detection": list(bundle.LoopDetection.model_fields),
    "spec/session": list(bundle.Session.model_fields),
    "spec/loop_detection/escalate": list(Escalation.model_fields),
    "an entry of tools": list(Tool.model_fields),
    "an entry of bypass": list(bundle.Bypass.model_fields),
    "a rule": list(bundle.Rule.model_fields),
    "an override": list(bundle.Override.model_fields),
    "a kill switch": list(bundle.KillSwitch.model_fields),
}
"""What may stand in each object of a policy file, in the order in which a misplaced key is looked for."""

_OBJECTS = {
    "selector": "spec/selector",
    "loop_detection": "spec/loop_detection",
    "escalate": "spec/loop_detection/escalate",
    "bypass": "an entry of bypass",
    "session": "spec/session",
    "spec": "spec",
}
"""What the object below a key is called."""


def _phrase_unknown_key(model: type[BaseModel], name: str, place: Place) -> str:
    """Which key was meant, or where it belongs."""
    own = _name_object(model, [str(step) for step in place[:-1] if isinstance(step, str)])
    started = [key for key in _KEYS[own] if key.startswith(f"{name}_")]
    if len(started) == 1:
        return f"unknown key; did you mean {started[0]}?"
    owner = next((other for other, keys in _KEYS.items() if name in keys and other != own), None)
    if owner is not None:
        return f"unknown key; {name} belongs into {owner}"
    close = difflib.get_close_matches(name, _KEYS[own], n=1)
    if close:
        return f"unknown key; did you mean {close[0]}?"
    return "unknown key; only description and x-... may be added"


_NAMES: dict[type[BaseModel], str] = {Envelope: "the bundle", bundle.KillSwitch: "a kill switch"}
"""What the whole of a model is called; the others are policies."""


def _name_object(model: type[BaseModel], above: Sequence[str]) -> str:
    """What the object is called that stands below these keys."""
    if "tools" in above:
        return "an entry of tools"
    if not above:
        return _NAMES.get(model, "the policy")
    return _OBJECTS.get(above[-1], "an override" if model is Envelope else "a rule")
