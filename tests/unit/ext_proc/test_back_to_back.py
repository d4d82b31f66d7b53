"""Requests back to back, and the access log entries that report their ends."""

import json
from time import monotonic
from typing import Any

import pytest

from extproc.engine.entries import STOPPED_SECONDS
from extproc.engine.plan import BARE_REFUSED_FROM
from extproc.engine.settlements import Entry
from extproc.ext_proc.access_log import read_message
from extproc.ext_proc.service import Service
from extproc.store.rules.back_to_back import LEFT_OUT, End
from tests.support.documents import bare_policy
from tests.support.envoy_logs import SESSION, log
from tests.support.service import CHAT, ask, make_service, metadata_of, sample, status

LADDER: dict[str, Any] = {
    "window_type": "back_to_back",
    "threshold_identical_requests": 3,
    "action": "steer",
    "escalate": {"throttle": 5, "reject": 8},
    "max_delay_ms": 1,
}
STAND_IN = {
    "window_type": "sliding_log",
    "window_seconds": 60,
    "threshold_identical_requests": 5,
    "only_without_entries": True,
}
USER = {"role": "user", "content": "Is it done?"}
ASSISTANT = {"role": "assistant", "content": "Not yet."}
TOOLS = [{"type": "function", "function": {"name": "check", "parameters": {}}}]
BARE: dict[str, Any] = {"model": "m", "messages": [USER]}
WITH_TOOLS = {**BARE, "tools": TOOLS}


def make_guarded(*loops: dict[str, Any], **spec: Any) -> Service:  # noqa: ANN401  # of a policy
    named = [
        {"enabled": True, "name": f"loop-{number}", **loop} for number, loop in enumerate(loops)
    ]
    return make_service(
        bare_policy("p", limit_keys=["header:x-user-id"], loop_detection=named, **spec)
    )


def report(service: Service, metadata: dict[str, Any], **entry: Any) -> None:  # noqa: ANN401  # see `add_entry`
    """Let Envoy report the end of a request with this metadata."""
    text = json.loads(metadata["sessions"])
    ((found,), _) = read_message(log({"sessions": text, **entry}))
    service.settle_entry(found)


def send(service: Service, data: object, *, entry: bool = True, path: str = CHAT) -> str:
    """The action on a request, which ends at once."""
    answer = ask(service, data, path, x_user_id="ann")
    told = metadata_of(answer)
    if entry and "sessions" in told:
        report(service, told)
    assert status(answer) == (429 if told.get("action") == "reject" else 200)
    return str(told.get("action", "allow"))


def send_many(service: Service, data: object, times: int, **more: Any) -> list[str]:  # noqa: ANN401  # of `send`
    return [send(service, data, **more) for _ in range(times)]


@pytest.mark.parametrize(
    "data",
    [WITH_TOOLS, {**BARE, "messages": [USER, ASSISTANT, USER]}],
    ids=["tools", "a turn of the assistant"],
)
def test_agent_gets_each_action_at_its_threshold(data: object) -> None:
    found = send_many(make_guarded(LADDER), data, 10)

    assert found == [*["allow"] * 2, *["steer"] * 2, *["throttle"] * 3, *["reject"] * 3]


BARE_BODIES = {
    "chat": (CHAT, BARE),
    "no tools": (CHAT, {**BARE, "tools": []}),
    "the start of the answer": ("/v1/messages", {**BARE, "messages": [USER, ASSISTANT]}),
    "responses": ("/v1/responses", {"model": "m", "input": "Is it done?"}),
    "a completion": ("/v1/completions", {"model": "m", "prompt": "Is it done?"}),
    "other JSON": ("/v1/x", {"question": "Is it done?"}),
    "no JSON": ("/v1/x", b"Is it done?"),
}


@pytest.mark.parametrize("name", BARE_BODIES)
def test_bare_body_is_never_steered_nor_refused_early(name: str) -> None:
    path, data = BARE_BODIES[name]

    found = send_many(make_guarded(LADDER), data, BARE_REFUSED_FROM + 1, path=path)

    assert found[:8] == [*["allow"] * 2, *["warn"] * 2, *["throttle"] * 4]
    assert set(found[8:-2]) == {"throttle"}
    assert found[-2:] == ["reject"] * 2


def test_bare_body_is_warned_where_no_delay_is_configured() -> None:
    loop = {**LADDER, "action": "reject", "escalate": {}}

    found = send_many(make_guarded(loop), BARE, 6)

    assert found == [*["allow"] * 2, *["warn"] * 4]


def test_requests_without_entries_count_two_at_most() -> None:
    assert set(send_many(make_guarded(LADDER), WITH_TOOLS, 20, entry=False)) == {"allow"}


def test_failed_requests_are_left_out() -> None:
    service = make_guarded(LADDER)
    for _ in range(10):
        report(service, metadata_of(ask(service, WITH_TOOLS, x_user_id="ann")), status=503)

    assert send(service, WITH_TOOLS) == "allow"


def test_entry_reports_time_from_last_request_byte_to_last_response_byte() -> None:
    counter = ["back_to_back", "loop:p:l:back_to_back::00", "0a" * 8]
    cases: list[tuple[dict[str, Any], int]] = [
        (
            {"times": {"time_to_last_rx_byte": 300, "time_to_last_downstream_tx_byte": 62_400}},
            62_100,
        ),
        ({"times": {"time_to_last_rx_byte": 300, "duration": 900}}, 600),
        ({"times": {"duration": 900, "time_to_last_downstream_tx_byte": 800}}, 900),
        ({}, 0),
        ({"status": 502, "times": {"duration": 900}}, LEFT_OUT),
    ]
    for entry, lasted in cases:
        ((found,), _) = read_message(log({"sessions": [{"counted": [counter]}], **entry}))

        assert found.counted == [End(counter[1], b"\x0a" * 8, lasted)]


@pytest.mark.parametrize(
    "counter",
    [
        ["back_to_back", "loop:p:l:back_to_back::00"],
        ["back_to_back", "loop:p:l:back_to_back::00", "0a"],
        ["back_to_back", "other:p:l:back_to_back::00", "0a" * 8],
        ["back_to_back", "loop:p:l:back_to_back::00", 7],
        "back_to_back",
    ],
)
def test_counters_of_others_are_ignored(counter: object) -> None:
    ((found,), _) = read_message(log({"sessions": [SESSION, {"counted": [counter]}]}))

    assert isinstance(found, Entry)
    assert found.counted == []


def test_other_detector_acts_until_the_first_entry() -> None:
    service = make_guarded(LADDER, STAND_IN)

    assert send_many(service, WITH_TOOLS, 6, entry=False) == [*["allow"] * 4, *["reject"] * 2]
    send(service, BARE)
    assert send_many(service, WITH_TOOLS, 6, entry=False) == ["allow"] * 6


def test_other_detector_takes_over_when_entries_stop() -> None:
    service = make_guarded(LADDER, STAND_IN)
    send(service, WITH_TOOLS)
    service.entries.note_begun(monotonic() - STOPPED_SECONDS)

    found = send_many(service, BARE, 20, entry=False)

    assert found == [*["allow"] * 13, *["reject"] * 7]
    assert sample(service, "access_log_entries_total", result="missing") > 0


def test_few_requests_without_entry_are_no_sign() -> None:
    """Their answers may take long."""
    service = make_guarded(LADDER, STAND_IN)
    send(service, WITH_TOOLS)
    service.entries.note_begun(monotonic() - STOPPED_SECONDS)

    assert set(send_many(service, BARE, 8, entry=False)) == {"allow"}
    assert sample(service, "access_log_entries_total", result="missing") == 0


def test_refused_requests_need_no_entry() -> None:
    service = make_guarded({**LADDER, "action": "reject", "escalate": {}}, STAND_IN)
    send_many(service, WITH_TOOLS, 5)
    service.entries.note_begun(monotonic() - STOPPED_SECONDS)

    assert set(send_many(service, WITH_TOOLS, 20, entry=False)) == {"reject"}
    assert sample(service, "access_log_entries_total", result="missing") == 0


def test_entries_at_another_replica_count_as_arriving() -> None:
    service = make_guarded(LADDER, STAND_IN)
    service.note_entry(own=False)

    assert set(send_many(service, WITH_TOOLS, 9, entry=False)) == {"allow"}
    assert not service.entries.is_fresh(monotonic())


def test_reloaded_policies_know_that_entries_arrive() -> None:
    service = make_guarded(LADDER, STAND_IN)
    send(service, BARE)
    service.follow(make_guarded(LADDER, STAND_IN).engine)

    assert set(send_many(service, WITH_TOOLS, 9, entry=False)) == {"allow"}


def test_shadow_policy_reports_and_changes_nothing() -> None:
    service = make_guarded(LADDER, mode="shadow")

    answers = [ask(service, WITH_TOOLS, x_user_id="ann")]
    for _ in range(9):
        report(service, metadata_of(answers[-1]))
        answers.append(ask(service, WITH_TOOLS, x_user_id="ann"))

    assert {status(answer) for answer in answers} == {200}
    assert metadata_of(answers[-1])["shadow_action"] == "reject"


def test_client_that_retries_refusals_at_once_stays_refused() -> None:
    service = make_guarded({**LADDER, "action": "reject", "escalate": {}})

    assert send_many(service, WITH_TOOLS, 40)[2:] == ["reject"] * 38
