"""The places of the bundle's models and their names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from extproc.objects import Place


def find_object(model: type[BaseModel], place: Place) -> type[BaseModel] | None:
    """The model of the object at a place below another model's; None if any key is allowed there, or no object."""
    found: Any = model
    for step in place:
        found = _step_down(found, step)
    models = [one for one in _list_alternatives(found) if _is_model(one)]
    return models[0] if len(models) == 1 else None


def list_objects(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every object below a model, by name: its place, or an entry of the list or mapping that contains it."""
    found = [
        (f"an entry of {name}" if held else f"{above}{name}", one)
        for name, field in model.model_fields.items()
        for held, one in _list_models(field.annotation)
    ]
    yield from found
    for name, one in found:
        yield from list_objects(one, f"{name}/" if not name.startswith("an ") else "")


def _list_models(kind: Any) -> list[tuple[bool, type[BaseModel]]]:  # noqa: ANN401  # an annotation
    """The models that a field may contain, and whether only in a list or a mapping."""
    alternatives = _list_alternatives(kind)
    alone = [(False, one) for one in alternatives if _is_model(one)]
    items = [item for one in alternatives if get_origin(one) in (list, dict) for item in _list_alternatives(get_args(one)[-1])]
    return alone or [(True, item) for item in items if _is_model(item)]


def _step_down(kind: Any, step: str | int) -> Any:  # noqa: ANN401  # annotations
    """The annotation one step below."""
    for one in _list_alternatives(kind):
        if _is_model(one) and step in one.model_fields:
            return one.model_fields[step].annotation
        if get_origin(one) is (list if isinstance(step, int) else dict):
            return get_args(one)[-1]
    return None


def _list_alternatives(kind: Any) -> list[Any]:  # noqa: ANN401  # annotations
    """The members of a union, without annotations."""
    if get_origin(kind) is Annotated:
        return _list_alternatives(get_args(kind)[0])
    if get_origin(kind) in (list, dict, None):
        return [kind]
    return [found for member in get_args(kind) for found in _list_alternatives(member)]


def _is_model(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
