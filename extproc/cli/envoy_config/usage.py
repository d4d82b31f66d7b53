"""Envoy's rules that extract token counts from responses; `apis` has the places."""

from __future__ import annotations

from extproc.apis import COUNT_PLACES, EVENT_OBJECTS, MODEL_PLACES, STREAMED_DOCUMENTS
from extproc.apis.usage import MODEL, USAGE_NAMESPACE

_NUMBER = "NUMBER"
_TEXT = "STRING"

_STREAMED = """\
- predicate:
    single_predicate:
      input:
        name: path
        typed_config:
          "@type": type.googleapis.com/envoy.type.matcher.v3.HttpRequestHeaderMatchInput
          header_name: ":path"
      value_match: {contains: "$part"}
  on_match: *pass"""


def write_rules() -> str:
    """The rules for a response in one document: one for each count."""
    counts = [
        _write_rule(place, name, _NUMBER)
        for name, places in COUNT_PLACES.items()
        for place in places
    ]
    return "\n".join(f"- {rule}" for rule in [*counts, *_MODEL_RULES])


def write_event_rules() -> str:
    """The rules for an event of a stream: one per object with counts, passed as text."""
    objects = [_write_rule(place, place, _TEXT) for place in EVENT_OBJECTS]
    return "\n".join(f"- rule: {rule}" for rule in [*objects, *_MODEL_RULES])


def write_streamed_matchers() -> str:
    """Matchers for paths whose response is a document in pieces, which Envoy must not buffer."""
    return "\n".join(_STREAMED.replace("$part", part) for part in STREAMED_DOCUMENTS)


def _write_rule(place: str, name: str, kind: str) -> str:
    keys = ", ".join(f"{{key: {key}}}" for key in place.split("."))
    put = f"{{metadata_namespace: {USAGE_NAMESPACE}, key: {name}, type: {kind}}}"
    return f"{{selectors: [{keys}], on_present: {put}}}"


_MODEL_RULES = [_write_rule(place, MODEL, _TEXT) for place in MODEL_PLACES]
