"""Messages for pydantic's errors: the field, what is expected, and what was found."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeAlias, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from extproc.budgets.rule_keys import CONFIGS, Rule
from extproc.objects import Place
from extproc.policy import bundle
from extproc.policy.bundle import Envelope, Policy
from extproc.request.limit_keys import KEY_TAG, OBJECT_TAG

_LONGEST = 60
_LIMITS: Place = ("spec", "session_limits")

_NAMED: tuple[Place, ...] = (
    ("tools",),
    ("prices",),
    ("max_calls_per_tool",),
    ("aliases",),
    ("match",),
)
"""Mappings whose keys are checked."""

_Phrase: TypeAlias = Callable[[str, Mapping[str, Any]], str]
"""Makes a message from a field's name and pydantic's context of the error."""


def _find_object(model: type[BaseModel], place: Place) -> type[BaseModel] | None:
    """The model of the object at a place below a model; None if unknown or any key is allowed."""
    found: Any = model
    for step in place:
        found = _step_down(found, step)
    models = [one for one in _list_alternatives(found) if _is_model(one)]
    return models[0] if len(models) == 1 else None


def _list_objects(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every object below a model by name: its place, or `an entry of` its list or mapping."""
    found = [
        (f"an entry of {name}" if held else f"{above}{name}", one)
        for name, field in model.model_fields.items()
        for held, one in _list_models(field.annotation)
    ]
    yield from found
    for name, one in found:
        yield from _list_objects(one, f"{name}/" if not name.startswith("an ") else "")


def _list_models(kind: Any) -> list[tuple[bool, type[BaseModel]]]:  # noqa: ANN401  # an annotation
    """The models that a field may contain, and whether each is in a list or mapping."""
    alternatives = _list_alternatives(kind)
    alone = [(False, one) for one in alternatives if _is_model(one)]
    items = [
        item
        for one in alternatives
        if get_origin(one) in (list, dict)
        for item in _list_alternatives(get_args(one)[-1])
    ]
    return alone or [(True, item) for item in items if _is_model(item)]


def _step_down(kind: Any, step: str | int) -> Any:  # noqa: ANN401  # annotations
    for one in _list_alternatives(kind):
        if _is_model(one) and step in one.model_fields:
            return one.model_fields[step].annotation
        if get_origin(one) is (list if isinstance(step, int) else dict):
            return get_args(one)[-1]
    return None


def _list_alternatives(kind: Any) -> list[Any]:  # noqa: ANN401  # annotations
    """The members of a union, without `Annotated`."""
    if get_origin(kind) is Annotated:
        return _list_alternatives(get_args(kind)[0])
    if get_origin(kind) in (list, dict, None):
        return [kind]
    return [found for member in get_args(kind) for found in _list_alternatives(member)]


def _is_model(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def explain(model: type[BaseModel], failure: ValidationError) -> Iterator[tuple[Place, str]]:
    """Every error of a validation: its place below the value, and the message."""
    for error in failure.errors(include_url=False):
        place = _leave_out_tags(error["loc"])
        yield place, _phrase(model, place, error)


def describe(value: object) -> str:
    """A value for a message, shortened."""
    if isinstance(value, list | dict):
        kind = "array" if isinstance(value, list) else "object"
        return f"an {kind}" if value else f"an empty {kind}"
    text = value if isinstance(value, str) else json.dumps(value)
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return repr(shown) if isinstance(value, str) else shown


def _leave_out_tags(place: Place) -> Place:
    """A place without steps that pydantic adds: tags of unions, and marks of invalid keys."""
    if place[:2] == ("spec", "loop_detection") and place[2:3] in ((bundle.OBJECT,), (bundle.LIST,)):
        place = (*place[:2], *place[3:])
    if KEY_TAG in place or OBJECT_TAG in place:
        number = next(at for at, step in enumerate(place) if step in (KEY_TAG, OBJECT_TAG))
        place = (
            (*place[:number], *place[number + 1 :]) if isinstance(place[number - 1], int) else place
        )
    return place[:-1] if place[-1:] == ("[key]",) and place[-3:-2] in _NAMED else place


def _phrase(model: type[BaseModel], place: Place, error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    name = str(place[-1]) if place and isinstance(place[-1], str) and place[-1] else "it"
    if kind == "extra_forbidden":
        return f"{name} {_GONE[name]}" if name in _GONE else _phrase_unknown_key(model, name, place)
    if kind in _NOTHING_FOUND:
        return _NOTHING_FOUND[kind](name, context)
    if place == ("spec", "loop_detection") and kind.startswith("model"):
        right = f"{name} must be an object or an array of objects"
    elif kind.startswith("model"):
        right = _phrase_object(model, name, place)
    else:
        right = _PHRASES[kind](name, context) if kind in _PHRASES else error["msg"]
    # If the input is the name, the key itself is wrong
    found = "" if error["input"] == name else f", not {describe(error['input'])}"
    return f"{right}{found}{context.get('why', '')}"


def _phrase_choices(name: str, context: Mapping[str, Any]) -> str:
    choices = str(context["expected"]).replace(" or ", ", ").replace("'", "")
    return f"{name} must be {'one of ' if ',' in choices else ''}{choices}"


def _phrase_integer(name: str, _: Mapping[str, Any]) -> str:
    kind = (
        "a positive integer"
        if name in {"window_seconds", "threshold_identical_requests"}
        else "an integer"
    )
    return f"{name} must be {kind}"


def _phrase_greater_than(name: str, context: Mapping[str, Any]) -> str:
    if name.endswith("_seconds"):
        return f"{name} must be a positive integer"
    return f"{name} must be greater than {context['gt']:g}"


def _say(text: str) -> _Phrase:
    return lambda name, _: f"{name} {text}"


_NOTHING_LEFT_OUT = {
    "loop_detection": "; leave it out",
    "keys": "; leave it out for the headers that agents send anyway",
    "ramp_by": "; leave it out for the policy's limit_keys",
    "staged_actions": "; it needs at least one stage",
}
"""The advice for an empty array, if not to omit the field to match any value."""

_NOTHING_FOUND: dict[str, _Phrase] = {
    "missing": _say("is required"),
    "string_too_short": _say("must not be empty"),
    "string_too_long": lambda name, context: (
        f"{name} must be at most {context['max_length']} characters"
    ),
    "too_short": lambda name, _: (
        f"{name} must not be an empty "
        f"array{_NOTHING_LEFT_OUT.get(name, '; leave it out to match any')}"
    ),
}
"""Messages that do not mention the value, by pydantic's error type."""

_PHRASES: dict[str, _Phrase] = {
    "literal_error": _phrase_choices,
    "greater_than": _phrase_greater_than,
    "greater_than_equal": lambda name, context: f"{name} must be >= {context['ge']:.15g}",
    "less_than_equal": lambda name, context: f"{name} must be <= {context['le']:.15g}",
    "bool_type": _say("must be a boolean"),
    "int_type": _phrase_integer,
    "float_type": _say("must be a number"),
    "finite_number": _say("must be a finite number"),
    "string_type": _say("must be a string"),
    "list_type": _say("must be an array"),
    "dict_type": _say("must be an object"),
    "loopguard": lambda name, context: f"{name} {context['message']}",
}

_GONE = {"extra_rules": "is gone: remove the key; similar errors are always noted"}
"""Keys of earlier versions, and what to do instead."""

_FEW = 12
"""Maximum number of keys to list if no known key is similar."""

_MODELS: dict[str, type[BaseModel]] = {"the bundle": Envelope, "the policy": Policy}
_MODELS |= sorted(_list_objects(Policy), key=lambda found: "session_limits" in found[0])
_MODELS |= {**dict(_list_objects(Envelope)), "a kill switch": bundle.KillSwitch}
"""Each object of a policy file, in the order of the search for a misplaced key."""


def _phrase_unknown_key(model: type[BaseModel], name: str, place: Place) -> str:
    """Suggest the key that was meant, or where it belongs."""
    own = _find_object(model, place[:-1])
    keys = list(own.model_fields) if own is not None else []
    started = [
        key
        for key in keys
        if key.startswith(f"{name}_") or name.startswith(f"{key}_") or f"_{name}_" in key
    ]
    if len(started) == 1:
        return f"unknown key; did you mean {started[0]}?"
    owner = (
        "the rule itself"
        if model in CONFIGS.values() and name in Rule.model_fields
        else _find_owner(name, place)
    )
    if owner:
        return f"unknown key; {name} belongs in {owner}"
    close = difflib.get_close_matches(name, keys, n=1)
    if close:
        return f"unknown key; did you mean {close[0]}?"
    if 0 < len(keys) <= _FEW:
        return f"unknown key; known keys are {', '.join(keys)}"
    return "unknown key; only description and x-... can be added"


def _find_owner(name: str, place: Place) -> str:
    """The object to which a misplaced key belongs; empty if unknown.

    Keys below session_limits are not suggested elsewhere: some share their name with other objects'
    keys, but not their meaning.
    """
    owners = [owner for owner, model in _MODELS.items() if name in model.model_fields]
    below = [owner for owner in owners if owner.startswith("spec/session_limits/")]
    others = [owner for owner in owners if owner not in below]
    if place[: len(_LIMITS)] != _LIMITS:
        return next(iter(others), "")
    return next(iter(below + others), "") if place[:-1] == _LIMITS else ""


def _phrase_object(model: type[BaseModel], name: str, place: Place) -> str:
    own = _find_object(model, place)
    if own is None or len(own.model_fields) > _FEW or own.model_config.get("extra") == "allow":
        return f"{name} must be an object"
    keys = ", ".join(f'"{key}"' for key in own.model_fields)
    return f"{name} must be an object {{{keys}}}"
