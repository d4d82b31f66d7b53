"""Make reference.md: flags, policy keys, metrics and findings, as the code describes them.

python docs/generate.py            writes it
python docs/generate.py --check    writes nothing; exit code 1 if it is out of date
"""  # noqa: INP001  # a script beside the pages, not a package

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from extproc.metrics import Metrics
from extproc.operator.canary.pairs import Pairs
from extproc.options import ENVIRONMENT_ONLY
from extproc.policy.bundle import make_schema
from extproc.settings import ENV_PREFIX, Settings

PAGE = Path(__file__).parent / "reference.md"

HEAD = """# Reference

`python docs/generate.py` writes this page from the code. `loopguard --help` lists the commands, and
`loopguard COMMAND --help` the flags of each, with examples."""

SERVE_HEAD = """Every flag is also an environment variable: `--max-streams` is `LOOPGUARD_MAX_STREAMS`. If both are set, the
flag is used."""

KEYS_HEAD = """`loopguard schema` prints the JSON Schema, for editors. Every object can also have `description` and keys that
start with `x-`, which are ignored. [Policies](policies.md) and [detectors](detectors.md) explain the keys."""

METRICS_HEAD = "Loopguard serves these at `/metrics` of the admin port."

UNENFORCED = {"Rule", "FallbackLimit"}
"""Parts of a Fairvisor bundle of which nothing but `limit_keys` has an effect."""


def make_page() -> str:
    """The whole of reference.md."""
    blocks = [
        HEAD,
        "## Flags of `serve`",
        SERVE_HEAD,
        _write_table("|flag|meaning|default|", [*_list_flags("serve"), *_list_variables()]),
        "## Policy keys",
        KEYS_HEAD,
        *_list_objects(),
        "## Metrics",
        METRICS_HEAD,
        _write_table("|metric|meaning|", _list_metrics()),
    ]
    return "\n\n".join(blocks) + "\n"


def _write_table(heading: str, rows: Iterable[str]) -> str:
    return "\n".join([heading, "|---" * (heading.count("|") - 1) + "|", *rows])


def _write_row(name: str, text: str, *cells: str) -> str:
    """A name and a sentence, with more cells behind it."""
    text = text if text[1].isupper() else text[0].upper() + text[1:]
    return "|".join(["", *[cell.replace("|", "\\|") for cell in (f"`{name}`", f"{text.removesuffix('.')}.", *cells)], ""])


def _split_default(text: str) -> tuple[str, str]:
    """A description, and the default that it ends with."""
    text, _, default = text.removesuffix(".").partition(". Default: ")
    return text, default


def _load(command: str) -> Any:  # noqa: ANN401  # a module
    return import_module(f"extproc.cli.commands.{command.replace('-', '_')}")


def _list_flags(command: str) -> Iterator[str]:
    """A row for each flag, from what its --help says."""
    parser = argparse.ArgumentParser(add_help=False)
    _load(command).add_flags(parser)
    for action in parser._actions:  # noqa: SLF001  # argparse has no other way to list them
        if action.option_strings:
            name = " ".join([action.option_strings[-1], *([action.metavar] if isinstance(action.metavar, str) else [])])
            text = re.sub(rf" \[{ENV_PREFIX}\w+\]$", "", action.help or "")
            text = re.sub(r" \(default (.+)\)$", r". Default: `\1`", text)
            text = re.sub(r" \(default: (.+)\)$", r". Default: \1", text)
            yield _write_row(name, *_split_default(text))


def _list_variables() -> Iterator[str]:
    """A row for each setting of `serve` that is not a flag."""
    for item in Settings.__dataclass_fields__.values():
        if item.metadata["metavar"] == ENVIRONMENT_ONLY:
            yield _write_row(f"{ENV_PREFIX}{item.name.upper()}", f"{item.metadata['help']}; {ENVIRONMENT_ONLY}", "")


def _list_objects() -> Iterator[str]:
    """For each object of a bundle, from the outside in: a heading, what it is, and a table of its keys."""
    definitions = make_schema()["$defs"]
    places: dict[str, list[str]] = {"Bundle": ["a bundle"]}
    waiting = ["Bundle"]
    while waiting:
        name = waiting.pop(0)
        definition = definitions[name]
        for key, value in definition["properties"].items():
            for below in re.findall(r'"#/\$defs/(\w+)"', json.dumps(value)):
                if below not in places and below not in UNENFORCED:
                    waiting.append(below)
                path = f"`{key}`" if name in ("Bundle", "Policy", "Spec") else f"{places[name][0][:-1]}.{key}`"
                if path not in places.setdefault(below, []):
                    places[below].append(path)
        yield f"### Keys of {' and '.join(places[name])}"
        yield definition["description"]
        required = definition.get("required", [])
        keys = sorted(definition["properties"].items(), key=lambda item: (item[0] not in required, item[0]))
        rows = []
        for key, each in keys:
            text, default = _split_default(each["description"])
            rows.append(_write_row(key, text, "required" if key in required else default or _show_default(each)))
        yield _write_table("|key|meaning|default|", rows)


def _show_default(schema: dict[str, Any]) -> str:
    default = schema.get("default")
    if default in (None, "", []) or isinstance(default, dict):
        return ""
    words = default if isinstance(default, list) else [default] if isinstance(default, str) else [json.dumps(default)]
    return ", ".join(f"`{word}`" for word in words)


def _list_metrics() -> Iterator[str]:
    """A row for each metric, with its labels."""
    metrics = Metrics()
    Pairs().show(metrics)
    for collector in dict.fromkeys(metrics.registry._names_to_collectors.values()):  # noqa: SLF001  # as below: labels of a metric
        (family,) = collector.collect()  # without a value yet are nowhere else
        labels = getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", ())
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield _write_row(name + (f"{{{','.join(labels)}}}" if labels else ""), family.documentation)


def main(arguments: list[str]) -> int:
    """Write the page, or say whether it is what would be written."""
    made = make_page()
    if "--check" in arguments:
        if PAGE.is_file() and PAGE.read_text() == made:
            return 0
        sys.stderr.write(f"{PAGE.name} is out of date: run python docs/generate.py\n")
        return 1
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
