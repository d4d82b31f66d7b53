"""Names of conversations that real programs send, and headers that change too often."""

import json
import logging
from typing import Any

import pytest

from extproc.ext_proc.service import Service
from extproc.request.document import Document
from extproc.request.http import HttpRequest
from extproc.sessions.changing import MOST_IN_A_ROW
from extproc.sessions.names import SessionNames, hash_session
from extproc.sessions.session_limits import BUDGET_KEYS, CONVERSATION_KEYS
from tests.support.bundles import check, refused, spec
from tests.support.service import make_service, metadata_of, sample, status
from tests.support.session_limits import ask, limited, turns
from tests.support.sessions import agents, ask as sessions_ask, turn

CONVERSATION = SessionNames(CONVERSATION_KEYS, usual=True)
BUDGET = SessionNames(BUDGET_KEYS, usual=True)


def name(names: SessionNames, body: object = None, **headers: str) -> str:
    raw = {key.replace("_", "-"): value.encode() for key, value in headers.items()}
    request = HttpRequest("POST", "/v1/chat/completions", headers=raw)
    return names.find(
        names.read(request), Document(json.dumps(body).encode()) if body is not None else None
    )


CLAUDE = {"x_claude_code_session_id": "run"}
OPENCODE = {
    "x_session_id": "ses_child",
    "x_session_affinity": "ses_child",
    "x_parent_session_id": "ses_run",
}


@pytest.mark.parametrize(
    ("sent", "conversation", "root"),
    [
        (CLAUDE, "header:x-claude-code-session-id=run", "header:x-claude-code-session-id=run"),
        (
            CLAUDE | {"x_claude_code_agent_id": "a1"},
            "header:x-claude-code-agent-id=a1",
            "header:x-claude-code-session-id=run",
        ),
        (
            {"session_id": "run", "x_client_request_id": "run"} | {"thread_id": "t1"},
            "header:thread-id=t1",
            "header:session-id=run",
        ),
        (OPENCODE, "header:x-session-id=ses_child", "header:x-session-id=ses_run"),
        ({"x_session_id": "ses_run"}, "header:x-session-id=ses_run", "header:x-session-id=ses_run"),
        ({"x_session_affinity": "s"}, "header:x-session-affinity=s", "header:x-session-affinity=s"),
        ({"x_acme_session_id": "s"}, "header:x-acme-session-id=s", "header:x-acme-session-id=s"),
        (
            {"x_zebra_session_id": "z", "x_acme_session_id": "s"},
            "header:x-acme-session-id=s",
            "header:x-acme-session-id=s",
        ),
        (
            {"x_acme_session_id": "s", "agent_session_id": "l"},
            "header:agent-session-id=l",
            "header:agent-session-id=l",
        ),
    ],
    ids=[
        "claude",
        "claude's agent",
        "codex",
        "opencode's agent",
        "opencode",
        "affinity",
        "vendor",
        "vendors",
        "gateway",
    ],
)
def test_headers_name_the_conversation_and_its_root(
    sent: dict[str, str], conversation: str, root: str
) -> None:
    assert name(CONVERSATION, **sent) == hash_session(*conversation.split("="))
    assert name(BUDGET, **sent) == hash_session(*root.split("="))


@pytest.mark.parametrize("header", ["x_parent_session_id", "x__session_id", "x_session_id_hint"])
def test_header_of_a_parent_names_no_conversation(header: str) -> None:
    assert name(CONVERSATION, **{header: "s"}) == ""


@pytest.mark.parametrize(
    ("body", "key", "value"),
    [
        ({"conversation": "conv_1"}, "body:/conversation", "conv_1"),
        ({"conversation": {"id": "conv_1"}}, "body:/conversation/id", "conv_1"),
        ({"metadata": {"session_id": "s", "user_id": "u"}}, "body:/metadata/session_id", "s"),
        (
            {"metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'}},
            "body:/metadata/user_id",
            "s",
        ),
        ({"metadata": {"user_id": "user_0af3_account__session_s"}}, "body:/metadata/user_id", "s"),
        ({"metadata": {"user_id": "alice"}}, "body:/metadata/user_id", "alice"),
        (
            {"metadata": {"user_id": '{"device_id":"d"}'}},
            "body:/metadata/user_id",
            '{"device_id":"d"}',
        ),
        (
            {"metadata": {"user_id": '{"session_id":7}'}},
            "body:/metadata/user_id",
            '{"session_id":7}',
        ),
        ({"metadata": {"user_id": "{odd"}}, "body:/metadata/user_id", "{odd"),
    ],
)
def test_body_names_a_conversation_without_a_header(
    body: dict[str, Any], key: str, value: str
) -> None:
    assert name(CONVERSATION, body) == name(BUDGET, body) == hash_session(key, value)
    assert name(CONVERSATION, body, x_session_id="h") == hash_session("header:x-session-id", "h")


def test_keys_of_a_policy_are_used_unchanged() -> None:
    own = SessionNames(["body:/metadata/user_id", "header:x-parent-session-id"])
    whole = '{"session_id":"s"}'

    assert name(own, {"metadata": {"user_id": whole}}) == hash_session(
        "body:/metadata/user_id", whole
    )
    assert name(own, x_parent_session_id="p") == hash_session("header:x-parent-session-id", "p")


def test_policy_key_may_match_any_vendor() -> None:
    keys = ["header:x-run", "header:x-*-session-id"]

    assert (
        check(spec(session={"keys": keys}, session_limits={"max_steps": 3}))
        .sources[0]
        .policies[0]
        .spec.session
        is not None
    )
    assert "header:<name>" in str(
        refused(spec(session={"keys": ["header:x-*-id"]}, session_limits={"max_steps": 3}))[0]
    )


def test_record_has_the_headers_that_name_sessions() -> None:
    service = make_service(agents(), record=True)

    answer = sessions_ask(service, turn(1), x_acme_session_id="s", x_parent_session_id="p")

    recorded = metadata_of(answer)["record"]["headers"]
    assert recorded["x-acme-session-id"]
    assert recorded["x-session-id"] is None
    assert "x-*-session-id" not in recorded
    assert "x-parent-session-id" not in recorded


KEY = "header:x-session-id"


def play(service: Service, names: list[str], first: int = 1, **more: str) -> list[int]:
    return [
        status(ask(service, turns(first + number), session=name, **more))
        for number, name in enumerate(names)
    ]


def changing(number: int) -> list[str]:
    return [f"r{at}" for at in range(number)]


def test_header_that_changes_with_every_request_is_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = make_service(limited(max_steps=20))

    with caplog.at_level(logging.WARNING):
        found = play(service, changing(30), first=0)
    other = play(service, ["s"] * 21, team="other")

    assert MOST_IN_A_ROW < 20
    assert (found, other) == ([200] * 20 + [429] * 10, [200] * 20 + [429])
    assert sample(service, "session_changing_total", policy="agents", key=KEY) == 1
    assert [line.getMessage() for line in caplog.records if "changes" in line.getMessage()] == [
        (
            f"{KEY} changes with every request of a caller, so it names no session; a default key "
            "is "
            "left out for that caller"
        )
    ]


@pytest.mark.deep
def test_many_named_conversations_are_not_taken_for_changing() -> None:
    service = make_service(limited(max_steps=100))

    for number in range(1, 7):
        for run in range(200):
            ask(service, turns(number), session=f"run{run}")

    assert sample(service, "session_changing_total", policy="agents", key=KEY) == 0
    assert len(service.reporter.sessions.copy()) == 100


def test_requests_without_history_may_each_have_a_name() -> None:
    service = make_service(limited(max_steps=1))

    found = [status(ask(service, turns(0, user=name), session=name)) for name in changing(40)]

    assert found == [200] * 40


def test_policy_key_that_changes_is_reported_and_used() -> None:
    service = make_service(limited(max_steps=1, session={"keys": [KEY]}))

    assert play(service, changing(30)) == [200] * 30
    assert sample(service, "session_changing_total", policy="agents", key=KEY) >= 1
    assert sample(service, "uncounted_total", policy="agents", reason="unnamed") == 0


def test_next_key_names_the_session() -> None:
    service = make_service(limited(max_steps=20))

    found = play(service, changing(40), x_session_affinity="s")

    assert found == [200] * (MOST_IN_A_ROW + 1 + 20) + [429] * (40 - MOST_IN_A_ROW - 21)
