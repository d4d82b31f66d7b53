"""An Envoy configuration in YAML or JSON, with the place of each value."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import yaml

from extproc.errors import UsageError
from extproc.operator.admin.client import read_bounded
from extproc.policy.strict_json import write_pointer

_TYPED_STRUCTS = (".udpa.type.v1.TypedStruct", ".xds.type.v3.TypedStruct")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)s\Z")
_MAX_VALUES = 1_000_000
"""A limit for YAML aliases of aliases."""

_PIECE = 2**16
MOST_DUMPED = 2**29
"""Maximum bytes of a config dump, more than any mesh has."""

_TIMEOUT = 10.0
"""Timeout of the admin port, in seconds."""


@dataclass(frozen=True, slots=True)
class ConfigPlace:
    """A value with its JSON Pointer (RFC 6901), and line numbers by pointer if known.

    A missing value has a place, too, with the value None.
    """

    value: Any
    pointer: str = ""
    lines: Mapping[str, int] = field(default_factory=dict, repr=False)

    @property
    def is_there(self) -> bool:
        """Whether it is set."""
        return self.value is not None

    @property
    def line(self) -> int | None:
        """The line in the file, or that of the nearest enclosing value with a line."""
        pointer = self.pointer
        while pointer not in self.lines:
            if not pointer:
                return None
            pointer = pointer.rpartition("/")[0]
        return self.lines[pointer]

    def get(self, *names: str) -> ConfigPlace:
        """A field, or a nested one, by its names in the .proto files; JSON may use camelCase."""
        place = self
        for name in names:
            value = place.value if isinstance(place.value, dict) else {}
            first, *rest = name.split("_")
            spelt = name if name in value else first + "".join(part.capitalize() for part in rest)
            place = place._step(spelt if spelt in value else name, value.get(spelt))
        return place

    def entry(self, key: str) -> ConfigPlace:
        """The value of a map by its exact key."""
        return self._step(key, self.value.get(key) if isinstance(self.value, dict) else None)

    def items(self) -> Iterator[ConfigPlace]:
        """The items of a list; protobuf accepts a single value as a list of one."""
        if not isinstance(self.value, list):
            yield from [self] if self.is_there else []
            return
        for number, value in enumerate(self.value):
            yield self._step(str(number), value)

    def entries(self) -> Iterator[tuple[str, ConfigPlace]]:
        for key in self.value if isinstance(self.value, dict) else ():
            yield key, self.entry(key)

    def walk(self) -> Iterator[ConfigPlace]:
        """Every object in it, depth first, including itself."""
        waiting = [self]
        while waiting:
            place = waiting.pop()
            if isinstance(place.value, dict):
                yield place
                waiting += reversed([below for _, below in place.entries()])
            elif isinstance(place.value, list):
                waiting += reversed(list(place.items()))

    def _step(self, step: str, value: object) -> ConfigPlace:
        return ConfigPlace(value, self.pointer + write_pointer((step,)), self.lines)

    def text(self, default: str = "") -> str:
        return self.value if isinstance(self.value, str) else default

    def number(self, default: float) -> float:
        """A number, which may be a string in JSON, or wrapped in a message."""
        found = self.value.get("value") if isinstance(self.value, dict) else self.value
        if isinstance(found, str):
            found = float(found) if re.fullmatch(r"\d+(\.\d+)?", found) else None
        return found if isinstance(found, int | float) and not isinstance(found, bool) else default

    def flag(self, *, default: bool = False) -> bool:
        """A bool, which may be wrapped in a message."""
        found = self.value.get("value") if isinstance(self.value, dict) else self.value
        return found if isinstance(found, bool) else default

    def seconds(self, default: float) -> float:
        if isinstance(self.value, dict):
            return self.get("seconds").number(0) + self.get("nanos").number(0) / 1e9
        found = _DURATION.match(self.text())
        return float(found[1]) if found else default

    def names(self) -> list[str]:
        return [item.text() for item in self.items()]

    def message(self) -> tuple[str, ConfigPlace]:
        """The type name of an Any, and its fields, which a TypedStruct has one level deeper."""
        kind = self.entry("@type").text().rpartition("/")[2]
        if f".{kind}".endswith(_TYPED_STRUCTS):
            return self.get("type_url").text().rpartition("/")[2], self.get("value")
        return kind, self


def read_file(path: str) -> ConfigPlace:
    """Read a file of YAML or JSON; raises UsageError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: {error.strerror if isinstance(error, OSError) else 'is not UTF-8'}"
        ) from None
    # Dumps have megabytes, and JSON is parsed a hundred times as fast as YAML
    if text.lstrip().startswith("{"):
        try:
            return ConfigPlace(msgspec.json.decode(text))
        except msgspec.DecodeError:
            pass  # a YAML mapping may begin with a brace, too
    return _read_yaml(path, text)


def _read_yaml(path: str, text: str) -> ConfigPlace:
    lines: dict[str, int] = {}
    try:
        loader = _Loader(text, lines)
        return ConfigPlace(loader.read(), "", lines)
    except (yaml.YAMLError, RecursionError) as error:
        told = " ".join(str(error).replace('"<unicode string>", ', "").split())
        raise UsageError(f"{path}: is neither YAML nor JSON: {told}") from None


class _Loader(yaml.SafeLoader):
    """Makes plain values and records the line of each."""

    def __init__(self, text: str, lines: dict[str, int]) -> None:
        super().__init__(text)
        self._lines = lines

    def read(self) -> Any:  # noqa: ANN401  # whatever the document holds
        """Read the single document; raises YAMLError if it is malformed, or there are several."""
        node = self.get_single_node()
        return None if node is None else self._note(node, "", ())

    def _note(self, node: yaml.Node, pointer: str, around: tuple[yaml.Node, ...]) -> Any:  # noqa: ANN401  # as above
        if node in around:
            raise yaml.YAMLError("an alias refers to itself")
        if len(self._lines) >= _MAX_VALUES:
            raise yaml.YAMLError(f"more than {_MAX_VALUES} values")
        self._lines[pointer] = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            self.flatten_mapping(node)
            keys = [(str(self.construct_object(key)), key, value) for key, value in node.value]
            made = {
                name: self._note(value, pointer + write_pointer((name,)), (*around, node))
                for name, _, value in keys
            }
            self._lines.update(
                {pointer + write_pointer((name,)): key.start_mark.line + 1 for name, key, _ in keys}
            )
            return made
        if isinstance(node, yaml.SequenceNode):
            return [
                self._note(item, f"{pointer}/{number}", (*around, node))
                for number, item in enumerate(node.value)
            ]
        return self.construct_object(node)


def fetch_dump(url: str) -> ConfigPlace:
    """Fetch the configuration of a running Envoy from its admin port; raises UsageError."""
    if not re.match(r"https?://", url):
        raise UsageError(f"--admin must be a URL, such as http://127.0.0.1:9901, not {url!r}")
    address = f"{url.rstrip('/')}/config_dump"
    try:
        # Http or https, checked above
        with urllib.request.urlopen(address, timeout=_TIMEOUT) as answer:  # noqa: S310
            dump = read_bounded(iter(partial(answer.read1, _PIECE), b""), address, MOST_DUMPED)
            return ConfigPlace(msgspec.json.decode(dump))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise UsageError(
            f"--admin {url}: no Envoy answered with its configuration: {reason}"
        ) from None
