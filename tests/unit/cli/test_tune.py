"""`loopguard tune`: each pair says what a replay with that pair would say, and the advice follows from them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.main import main
from extproc.cli.replay.tune import WindowPair, recommend
from tests.support.access_logs import USER, make_record, write_lines
from tests.support.documents import bundle, policy
from tests.support.engine import ANY
from tests.support.extent import deepen

WINDOWS = (10, 60, 300)
THRESHOLDS = (2, 3, 6)


def make_traffic() -> list[dict[str, Any]]:
    """Thirty callers who repeat themselves now and then, and one who loops."""
    dice = random.Random(4)
    calm = [make_record(n * 1.5, f"u{dice.randrange(30)}", f"t{dice.randrange(60)}") for n in range(1_500)]
    loop = [make_record(500 + n * 2, "mallory", "again") for n in range(40)]
    return sorted([*calm, *loop], key=lambda record: record["time"])


class Tuned:
    """One run of the command."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], document: object, *flags: str) -> None:
        """Tune a policy on the traffic."""
        (folder / "policies.json").write_text(json.dumps(document))
        (folder / "access.log").write_bytes(write_lines(make_traffic()))
        capsys.readouterr()
        self.code = main(["tune", "--policy", str(folder / "policies.json"), *flags, str(folder / "access.log")])
        printed = capsys.readouterr()
        self.out, self.error = printed.out, printed.err


PAIRS = ("--windows", ",".join(map(str, WINDOWS)), "--thresholds", ",".join(map(str, THRESHOLDS)))


@pytest.mark.slow
@pytest.mark.parametrize("window_type", deepen(["sliding_ttl", "sliding_log", "fixed"], "sliding_log"))
@pytest.mark.parametrize(
    "more", [{}, {"cooldown_seconds": 30}, {"count_refused": False}], ids=["plain", "cooldown", "uncounted"]
)
def test_each_pair_is_what_a_replay_says(
    window_type: str, more: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the window's type, with cooldowns and with refusals that do not count."""
    made = policy("p", ANY, window_seconds=60, threshold_identical_requests=3, window_type=window_type, **USER, **more)
    tuned = json.loads(Tuned(tmp_path, capsys, bundle(made), "--json", *PAIRS).out)
    variants = []
    for window in WINDOWS:
        for threshold in THRESHOLDS:
            loop = made["spec"]["loop_detection"] | {"window_seconds": window, "threshold_identical_requests": threshold}
            variants.append({"id": f"{window}-{threshold}", "spec": made["spec"] | {"loop_detection": loop}})
    (tmp_path / "variants.json").write_text(json.dumps(bundle(*variants)))

    assert main(["replay", "--policy", str(tmp_path / "variants.json"), "--json", str(tmp_path / "access.log")]) == 0
    replayed = json.loads(capsys.readouterr().out)["policies"]

    found = {f"{pair['window_seconds']}-{pair['threshold']}": (pair["requests"], pair["tenants"]) for pair in tuned["pairs"]}
    assert found == {item["policy"]: (item["loops"], item["tenants_touched"]) for item in replayed}
    assert len({requests for requests, _ in found.values()}) > 5


def test_the_ready_policy_is_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The policy as it was, with the recommended pair in it, is what `validate` takes."""
    made = policy("p", ANY, **USER)
    made["spec"]["loop_detection"] = [
        {"name": "off", "enabled": False},
        {"enabled": True, "similarity": "turns"},
        {"name": "mine", "enabled": True, "window_seconds": 60, "threshold_identical_requests": 3, "escalate": {"reject": 90}}
        | {"action": "warn"},
    ]
    tuned = Tuned(tmp_path, capsys, bundle(made), *PAIRS, "--output", str(tmp_path / "tuned.json"))
    ready = json.loads((tmp_path / "tuned.json").read_text())

    assert tuned.code == 0
    assert ready["spec"]["loop_detection"][:2] == made["spec"]["loop_detection"][:2]
    assert ready["spec"]["loop_detection"][2] | {"window_seconds": 0, "threshold_identical_requests": 0} == made["spec"][
        "loop_detection"
    ][2] | {"window_seconds": 0, "threshold_identical_requests": 0}
    assert main(["validate", str(tmp_path / "tuned.json")]) == 0
    assert "* " in tuned.out
    assert json.dumps(ready, indent=2) in tuned.out


def test_what_does_not_fit_any_more_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A later threshold that the recommended one has overtaken is named."""
    made = policy("p", ANY, action="warn", threshold_identical_requests=2, escalate={"reject": 4}, **USER)

    tuned = Tuned(tmp_path, capsys, bundle(made), "--windows", "60", "--thresholds", "30")

    assert tuned.code == 0
    assert "warning: the policy needs another change as well: " in tuned.error
    assert "escalate" in tuned.error


def test_the_advice_is_the_most_that_touches_few() -> None:
    """Of the pairs within the bound the one that acts on most, of equals the shortest window and the highest threshold."""
    pairs = [
        WindowPair(60, 3, 500, 40),
        WindowPair(60, 5, 90, 2),
        WindowPair(30, 5, 90, 2),
        WindowPair(30, 6, 90, 2),
        WindowPair(60, 9, 20, 1),
    ]

    advice = recommend(pairs, 5_000, 200, 1.0)

    assert advice.pair == WindowPair(30, 6, 90, 2)
    assert advice.reason == (
        "6 within 30 s acts on 90 of 5,000 requests, the most of all pairs that touch at most 2 of 200 callers (1%); "
        "it touches 2. The next one, 3 within 60 s, touches 40"
    )


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (
            [WindowPair(60, 3, 0, 0)],
            "no pair would have acted on any of 5,000 requests: this log has no loop that a window finds",
        ),
        (
            [WindowPair(60, 3, 90, 50), WindowPair(60, 4, 80, 40)],
            "touches more than 2 of 200 callers (1%); 4 within 60 s touches 40",
        ),
    ],
    ids=["no loops", "too many callers"],
)
def test_there_may_be_no_advice(pairs: list[WindowPair], said: str) -> None:
    """If no request loops, or every pair affects too many callers, nothing is recommended, and the reason is given."""
    advice = recommend(pairs, 5_000, 200, 1.0)

    assert advice.pair is None
    assert said in advice.reason


def test_little_traffic_is_said_to_be_little() -> None:
    """One caller may always be affected, and few requests allow few conclusions."""
    advice = recommend([WindowPair(60, 3, 5, 1)], 50, 3, 1.0)

    assert advice.pair == WindowPair(60, 3, 5, 1)
    assert "This is little traffic" in advice.reason


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "several policies act; choose one with --id: p, q, calls"),
        (("--id", "unknown"), "--id must name one of the policies that act: p, q, calls"),
        (("--id", "calls"), "has no window to tune: tool_calls finds loops in the request itself"),
        (("--id", "q"), "--detector must name one of these detectors of q: a, b"),
        (("--id", "p", "--windows", "0"), "--windows must be up to 12 numbers between 1 and"),
        (("--id", "p", "--thresholds", "1,x"), "--thresholds must be up to 12 numbers between 2 and"),
        (("--id", "p", "--max-touched", "101"), "--max-touched must be"),
    ],
)
def test_usage_errors_are_one_line(
    flags: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be tuned is said before the log is read."""
    counted = {"enabled": True, "window_seconds": 60, "threshold_identical_requests": 3}
    several = policy("q", ANY, **USER)
    several["spec"]["loop_detection"] = [{"name": "a", **counted}, {"name": "b", **counted, "window_seconds": 9}]
    document = bundle(policy("p", ANY, **USER), several, policy("calls", ANY, similarity="tool_calls", **USER))

    tuned = Tuned(tmp_path, capsys, document, *flags)

    assert tuned.code == 2
    assert said in tuned.error
