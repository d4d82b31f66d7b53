"""Presets do to equal requests what their descriptions and the documentation say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.policy.presets import PRESETS, find_preset
from tests.support import ROOT
from tests.support.budget_policies import CHAT, chat, serve, warning_of
from tests.support.messages import body, headers
from tests.support.service import decoded, exchange, metadata_of

CASES: Final = {
    "every 45 seconds (a monitor)": (60, 45_000),
    "every 20 seconds (a slow model)": (60, 20_000),
    "twenty at once (samples)": (20, 0),
    "every 2 seconds (a loop)": (60, 2_000),
}
"""The number of equal requests, and the milliseconds between them."""

REFUSED, DELAYED, WARNED, REPORTED = "are refused", "are delayed", "get a warning", "are reported"


def read_action(answer: ProcessingResponse) -> str:
    """What happened to a request, in the words of descriptions; empty if it passed."""
    detected = metadata_of(answer)
    if answer.HasField("immediate_response"):
        return REFUSED
    if detected.get("action") == "throttle":
        return DELAYED
    if warning_of(answer):
        return WARNED
    return REPORTED if "shadow_action" in detected else ""


def describe(policy: dict[str, Any], times: int, milliseconds: int) -> str:
    """What a policy does to equal requests, in the words of descriptions."""
    service, clock = serve(policy, max_throttled=100)
    path = CHAT if CHAT.startswith(policy["spec"]["selector"].get("pathPrefix", CHAT)) else "/webhooks/orders"
    caller = headers(path, authorization="Bearer k", attributes={"source.address": "192.0.2.1:80"})
    first: dict[str, int] = {}
    for number in range(1, times + 1):
        first.setdefault(read_action(decoded(exchange(service, caller, body(chat("Hi")))[-1])), number)
        clock.now += milliseconds
    first.pop("", None)
    words = [f"{action} from the {number}{ {2: 'nd', 3: 'rd'}.get(number, 'th') }" for action, number in first.items()]
    return " and ".join(words).replace(" and are ", " and ") or "pass"


@pytest.mark.parametrize("preset", PRESETS)
def test_equal_requests_get_what_the_description_says(preset: str) -> None:
    """The policy's description and the table of the documentation say the same."""
    policy = json.loads(Path(find_preset(preset)).read_text())
    row = re.search(rf"^\|`{preset}`\|(.*)\|$", (ROOT / "docs" / "policies.md").read_text(), re.MULTILINE)
    assert row is not None

    done = {what: describe(policy, *case) for what, case in CASES.items()}

    assert policy["description"].endswith(
        "Equal requests: " + "; ".join(f"{what} {words}" for what, words in done.items()) + "."
    )
    assert row[1].split("|") == [re.sub("^(are|get) ", "", words) for words in done.values()]


def test_the_table_has_the_same_cases() -> None:
    """In the same order."""
    assert f"\n|preset|{'|'.join(CASES)}|\n" in (ROOT / "docs" / "policies.md").read_text()


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*/policies/agents.json")), ids=lambda path: path.parts[-3])
def test_examples_detect_what_the_preset_does(path: Path) -> None:
    """They differ in callers and labels only."""
    example, preset = (json.loads(file.read_text()) for file in (path, Path(find_preset("agents"))))

    assert example["description"] == preset["description"]
    assert example["spec"]["loop_detection"] == preset["spec"]["loop_detection"]


@pytest.mark.parametrize("gap", [45, 59])
def test_a_monitor_is_never_delayed(gap: int) -> None:
    """Two of its requests are within any minute; it does not matter how many there were before."""
    policy = json.loads(Path(find_preset("agents")).read_text())

    assert describe(policy, 500, gap * 1_000) == "pass"


def test_a_loop_with_a_clock_and_attempts_is_refused() -> None:
    """Nor does an id for each request hide it."""
    service, clock = serve(json.loads(Path(find_preset("agents")).read_text()))
    actions = []
    for number in range(1, 41):
        prompt = {"model": "m", "seed": number, "metadata": {"request_id": f"r{number}"}, "temperature": number / 100}
        prompt["messages"] = [
            {"role": "system", "content": f"Current time: 2026-11-26T12:00:{number:02}Z"},
            {"role": "user", "content": f"Fetch the page (attempt {number})"},
        ]
        request = headers(CHAT, authorization="Bearer k"), body(json.dumps(prompt).encode())
        actions.append(read_action(decoded(exchange(service, *request)[-1])))
        clock.now += 1_000

    assert actions == [""] * 4 + [DELAYED] * 15 + [REFUSED] * 21


def test_items_of_a_template_are_not_counted_together() -> None:
    """Numbers that are no clock and no attempt are content."""
    service, _ = serve(json.loads(Path(find_preset("agents")).read_text()))

    for number in range(200):
        request = headers(CHAT, authorization="Bearer k"), body(chat(f"Translate item {number} of 200."))
        assert read_action(decoded(exchange(service, *request)[-1])) == ""
