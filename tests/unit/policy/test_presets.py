"""Presets do what their descriptions and the documentation say, and let others through."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest

from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.policy.presets import PRESETS, find_preset
from tests.support import ROOT
from tests.support.budget_policies import chat, serve, warning_of
from tests.support.messages import body, headers
from tests.support.service import CHAT, ask, decoded, exchange, headers_of, metadata_of

CASES: Final = {
    "every 45 seconds (a monitor)": (60, 45_000),
    "every 20 seconds (a slow model)": (60, 20_000),
    "twenty at once (samples)": (20, 0),
    "every 2 seconds (a loop)": (60, 2_000),
}
"""The number of equal requests, and the milliseconds between them."""

Sent = tuple[bytes, int]
"""A body, and the milliseconds after it."""

REFUSED, DELAYED, WARNED, REPORTED = "are refused", "are delayed", "get a warning", "are reported"


def read_preset(name: str) -> dict[str, Any]:
    # An object
    return json.loads(Path(find_preset(name)).read_text())  # type: ignore[no-any-return]


def read_action(answer: ProcessingResponse) -> str:
    detected = metadata_of(answer)
    if answer.HasField("immediate_response"):
        return REFUSED
    if detected.get("action") == "throttle":
        return DELAYED
    if warning_of(answer):
        return WARNED
    return REPORTED if "shadow_action" in detected else ""


def send_all(policy: dict[str, Any], requests: Iterable[Sent]) -> list[str]:
    """What a policy does to requests of one caller, in the words of descriptions."""
    service, clock = serve(policy, max_throttled=100)
    path = (
        CHAT
        if CHAT.startswith(policy["spec"]["selector"].get("pathPrefix", CHAT))
        else "/webhooks/orders"
    )
    caller = headers(path, authorization="Bearer k", attributes={"source.address": "192.0.2.1:80"})
    actions = []
    for content, milliseconds in requests:
        actions.append(read_action(decoded(exchange(service, caller, body(content))[-1])))
        clock.now += milliseconds
    return actions


def describe(policy: dict[str, Any], times: int, milliseconds: int) -> str:
    actions = send_all(policy, [(chat("Hi"), milliseconds)] * times)
    first = {action: actions.index(action) + 1 for action in dict.fromkeys(actions) if action}
    words = [
        f"{action} from the {number}{ {2: 'nd', 3: 'rd'}.get(number, 'th') }"
        for action, number in first.items()
    ]
    return " and ".join(words).replace(" and are ", " and ") or "pass"


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_preset_treats_equal_requests_as_described(preset: str) -> None:
    policy = read_preset(preset)
    page = (ROOT / "docs" / "policies.md").read_text()
    row = re.search(rf"^\|`{preset}`\|(.*)\|$", page, re.MULTILINE)
    assert f"\n|preset|{'|'.join(CASES)}|\n" in page
    assert row is not None

    done = {what: describe(policy, *case) for what, case in CASES.items()}

    assert policy["description"].endswith(
        "Equal requests: " + "; ".join(f"{what} {words}" for what, words in done.items()) + "."
    )
    assert row[1].split("|") == [re.sub("^(are|get) ", "", words) for words in done.values()]


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("examples/*/policies/agents.json")), ids=lambda path: path.parts[-3]
)
def test_examples_detect_what_the_preset_detects(path: Path) -> None:
    example, preset = json.loads(path.read_text()), read_preset("agents")

    assert example["description"] == preset["description"]
    assert example["spec"]["loop_detection"] == preset["spec"]["loop_detection"]


def with_a_clock(number: int) -> bytes:
    """A prompt in which only a clock, attempts and ids change."""
    prompt = {
        "model": "m",
        "seed": number,
        "metadata": {"request_id": f"r{number}"},
        "temperature": number / 100,
    }
    system = {"role": "system", "content": f"Current time: 2026-11-26T12:00:{number:02}Z"}
    user = {"role": "user", "content": f"Fetch the page (attempt {number})"}
    return json.dumps({**prompt, "messages": [system, user]}).encode()


def run_agents() -> list[Sent]:
    """100 agents of one key within 20 minutes, five at a time, each with a few steps."""
    requests: list[Sent] = []
    for start in range(0, 100, 5):
        for steps in range(4):
            for number in range(start, start + 5):
                messages = [{"role": "user", "content": "Look into the queue."}]
                for step in range(steps):
                    said = f"agent {number}, step {step}"
                    messages += [
                        {"role": "assistant", "content": said},
                        {"role": "user", "content": "go on"},
                    ]
                later = 15_000 if number == start + 4 else 0
                requests.append((json.dumps({"model": "m", "messages": messages}).encode(), later))
    return requests


SECTION = "Section {}. The supplier pays {} euros.\n\nWho pays?"
LOOPED = [""] * 24 + [REFUSED] * 16
TRAFFIC: dict[
    str, tuple[str, list[Sent], list[str]]
] = {  # preset, requests with the milliseconds after them, and actions
    "an equal loop": ("sessions", [(chat("Fetch the page"), 2_000)] * 40, LOOPED),
    "a loop with a seed and attempts": (
        "sessions",
        [(chat(f"Fetch the page (attempt {number})", seed=number), 2_000) for number in range(40)],
        LOOPED,
    ),
    "documents with one question": (
        "sessions",
        [(chat(SECTION.format(number, number * 7)), 0) for number in range(60)],
        [""] * 60,
    ),
    "twenty samples at once, and again": (
        "sessions",
        ([(chat("Name a colour."), 0)] * 19 + [(chat("Name a colour."), 60_001)]) * 3,
        [""] * 60,
    ),
    **{
        f"a monitor every {gap} seconds: {preset}": (
            preset,
            [(chat("Still there?"), gap * 1_000)] * 100,
            [""] * 100,
        )
        for preset, gap in (("sessions", 5), ("agents", 45))
    },
    "100 agents with one task": ("sessions", run_agents(), [""] * 400),
    "a loop with a clock, attempts and ids": (
        "agents",
        [(with_a_clock(number), 1_000) for number in range(1, 41)],
        [""] * 4 + [DELAYED] * 15 + [REFUSED] * 21,
    ),
    "items of a template": (
        "agents",
        [(chat(f"Translate item {number} of 200."), 0) for number in range(60)],
        [""] * 60,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAFFIC)
def test_presets_stop_loops_and_pass_similar_traffic(name: str) -> None:
    preset, requests, expected = TRAFFIC[name]

    assert send_all(read_preset(preset), requests) == expected


def test_refused_loop_gets_a_retry_after() -> None:
    service, _ = serve(read_preset("sessions"))
    answers = [
        ask(service, chat("Hi"), authorization=f"Bearer {key}") for key in ["k"] * 25 + ["l"]
    ]

    refusal = headers_of(answers[24])
    assert (refusal["X-Fairvisor-Reason"], int(refusal["Retry-After"]) > 0) == (
        "loop_detected",
        True,
    )
    assert read_action(answers[25]) == ""
