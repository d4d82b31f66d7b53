"""`helm upgrade` from the chart of the release before, with the values that it had."""

from __future__ import annotations

from pathlib import Path

import helm_python
import pytest

from tests.support import ROOT
from tests.support.chart import LEAST, NAMESPACE, RELEASE, Object, Values, environment, merged, objects, read_cases, split
from tests.support.versions import RELEASE_BEFORE, unpack


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart as it was."""
    folder = unpack(RELEASE_BEFORE, tmp_path_factory.mktemp("before"), "helm", "extproc/cli.py", "extproc/dashboards")
    return folder / "helm" / "loopguard"


def by_name(made: list[Object]) -> dict[tuple[str, str, str], Object]:
    """Objects as Kubernetes tells them apart; one was renamed, which CHANGELOG.md says, too."""
    names = [(item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"]) for item in made]
    renamed = [(kind, namespace, name.replace("-extra-refusals", "-new-refusals")) for kind, namespace, name in names]
    return dict(zip(renamed, made, strict=True))


def apply_changelog(values: Values) -> Values:
    """Make the changes that CHANGELOG.md asks for: a value was renamed, and rules, which were ignored, have to be complete."""
    changes, changed = (ROOT / "CHANGELOG.md").read_text(), merged(values)
    analysis = changed.get("analysis", {})
    if "maxExtraRefusals" in analysis:
        assert "`analysis.maxExtraRefusals` is now `analysis.maxNewRefusals`" in changes
        analysis["maxNewRefusals"] = analysis.pop("maxExtraRefusals")
    bundles = [changed.get("policies", {}), *changed.get("istio", {}).get("routes", ())]
    for spec in [policy["spec"] for each in bundles for policy in each.get("bundle", {}).get("policies", ())]:
        if "rules" in spec:
            assert "A rule without `algorithm` or `algorithm_config`, or with unknown keys, is now an error." in changes
            spec.pop("fallback_limit", spec.pop("rules"))
    return changed


def test_values_of_before_are_values_now(before: Path) -> None:
    """Objects keep their names and Deployments their selectors, which cannot change; pods run with the same settings."""
    chart = helm_python.Chart.load(before)
    cases = read_cases(before)
    assert len(cases) > 10
    for name, values in cases.items():
        then = by_name(split(chart.render(merged(LEAST, values), name=RELEASE, namespace=NAMESPACE)))
        now = by_name(objects(apply_changelog(values)))
        assert now.keys() == then.keys(), name
        for key, was in then.items():
            if key[0] == "Deployment":
                assert now[key]["spec"]["selector"] == was["spec"]["selector"], name
                assert environment(now[key]) == environment(was), name
            elif key[0] == "Service":
                assert now[key]["spec"] == was["spec"], name
