"""Checks PromQL against the metrics in the code: what it reads, and its result's labels."""

import ast
import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml
from prometheus_client import CollectorRegistry

from extproc.metrics import Metrics
from extproc.operator.canary.pairs import Pairs
from tests.support import ROOT

# Labels that Prometheus adds; the namespace in Kubernetes only.
TARGET = frozenset({"namespace", "job", "instance"})

_SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}

_ROW = re.compile(r"^\|`(\w+)\{?([\w,]*)\}?`\|", re.MULTILINE)

Series = dict[str, frozenset[str]]


def list_labels(registry: CollectorRegistry) -> dict[str, tuple[str, ...]]:
    """Labels by metric, without its suffix, as docs/reference.md has them."""
    rows = dict(_ROW.findall((ROOT / "docs" / "reference.md").read_text()))
    labels = {
        family.name: rows.get(family.name, rows.get(f"{family.name}_total"))
        for family in registry.collect()
    }
    return {
        name: tuple(filter(None, found.split(",")))
        for name, found in labels.items()
        if found is not None
    }


def series() -> Series:
    found = {}
    metrics = Metrics()
    Pairs().show(metrics)
    registry = metrics.registry
    labels = list_labels(registry)
    for family in registry.collect():
        for suffix in _SUFFIXES[family.type]:
            found[family.name + suffix] = frozenset(labels[family.name]) | (
                {"le"} if suffix == "_bucket" else set()
            )
    return found


@cache
def words() -> frozenset[str]:
    """All strings in the code, among them all label values."""
    files = (ROOT / "extproc").rglob("*.py")
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return frozenset(
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def run_promtool(document: dict[str, Any], folder: Path) -> None:
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", **document}))
    done = subprocess.run(
        ["promtool", "test", "rules", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def write_series(values: Mapping[str, str], **target: str) -> list[dict[str, str]]:
    """Series of promtool, with the labels of a target where they have none."""
    return [
        {"series": _add_target(name, target), "values": value} for name, value in values.items()
    ]


def _add_target(name: str, target: Mapping[str, str]) -> str:
    bare, _, labels = name.rstrip("}").partition("{")
    given = [f'{key}="{value}"' for key, value in target.items() if f"{key}=" not in labels]
    return f"loopguard_{bare}{{{','.join([*given, labels] if labels else given)}}}"


class Reading:
    """One expression: the labels of its result, and its mistakes."""

    def __init__(self, text: str, known: Series) -> None:
        self._known = known
        self.names: set[str] = set()
        self.problems: list[str] = []
        self.labels = self._labels(promql.parse(text))

    # The parser's node types have nothing in common
    def _labels(self, expr: Any) -> frozenset[str]:  # noqa: ANN401
        match expr:
            case promql.VectorSelector():
                found = frozenset(self._selected(expr))
            case promql.MatrixSelector():
                found = self._labels(expr.vector_selector)
            case promql.ParenExpr() | promql.SubqueryExpr() | promql.UnaryExpr():
                found = self._labels(expr.expr)
            case promql.Call():
                found = frozenset[str]().union(*map(self._labels, expr.args))
                found -= {"le"} if expr.func.name == "histogram_quantile" else set()
            case promql.AggregateExpr():
                found = self._aggregated(expr)
            case promql.BinaryExpr():
                found = self._combined(expr)
            case promql.NumberLiteral():
                found = frozenset()
            case _:
                raise NotImplementedError(type(expr))
        return found

    def _selected(self, selector: promql.VectorSelector) -> Iterator[str]:
        name = str(selector.name)
        self.names.add(name)
        if name not in self._known:
            self.problems.append(f"there is no {name}")
            return
        own = self._known[name]
        yield from own | TARGET
        for matcher in selector.matchers.matchers:
            if matcher.name not in own | TARGET:
                self.problems.append(f"{name} has no {matcher.name}")
            elif matcher.name in own and "$" not in matcher.value:
                unheard = set(matcher.value.split("|")) - words()
                self.problems += [f"{matcher.name} is never {value}" for value in sorted(unheard)]

    def _named(self, labels: list[str], there: frozenset[str]) -> frozenset[str]:
        self.problems += [f"{label} is not there" for label in labels if label not in there]
        return frozenset(labels)

    def _aggregated(self, expr: promql.AggregateExpr) -> frozenset[str]:
        there = self._labels(expr.expr)
        if expr.modifier is None:
            return there if str(expr.op) in {"topk", "bottomk"} else frozenset()
        named = self._named(expr.modifier.labels, there)
        return named if expr.modifier.type == promql.AggModifierType.By else there - named

    def _combined(self, expr: promql.BinaryExpr) -> frozenset[str]:
        left, right = self._labels(expr.lhs), self._labels(expr.rhs)
        if expr.modifier is not None and expr.modifier.matching is not None:
            self._named(expr.modifier.matching.labels, left & right)
        return left if str(expr.op) in {"and", "unless"} else left | right
