"""No request passes a budget without paying, on the real Envoy."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.documents import bundle
from tests.support.harness import PATIENCE, Stack, envoy_version, eventually, stack
from tests.support.stacks import open_before_model
from tests.support.usage import CHAT_USAGE, DELTA, Model, Reply, stream, whole

REJECT = [{"threshold_percent": 100, "action": "reject"}]
pytestmark = pytest.mark.skipif(envoy_version() < (1, 38), reason="this Envoy reads no answers: budgets are NOT settled")
CHAT = "/v1/chat/completions"


def make_policy(identity: str, **config: object) -> dict[str, Any]:
    """What each API key may use in a week, below the policy's name."""
    made = {"budget": 10_000, "period": "7d", "staged_actions": REJECT, "cost_key": "usage:tokens", **config}
    keyed = {"name": "r", "limit_keys": ["header:x-api-key"], "algorithm": "cost_based", "algorithm_config": made}
    return {"id": identity, "spec": {"selector": {"pathPrefix": f"/{identity}/"}, "rules": [keyed]}}


SHARED = make_policy("shared", budget=3, cost_key="fixed")
SHARED["spec"]["missing_descriptor"] = "share"
STRICT = make_policy("strict", budget=3, cost_key="fixed")
STRICT["spec"]["uncountable"] = "reject"
POLICIES = bundle(SHARED, STRICT, make_policy("plain"), make_policy("asks", usage="request"))


class Shop:
    """Envoy before a model that reports what a test wants."""

    def __init__(self, made: Stack, model: Model) -> None:
        self.made = made
        self.model = model
        self._used = dict.fromkeys(("plain", "asks"), 0.0)

    def ask(self, policy: str, key: str, reply: Reply, path: str = CHAT, **body: object) -> int:
        """One request; its status."""
        self.model.reply = reply
        data = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 40}], **body}).encode()
        headers = {"x-api-key": key, "content-type": "application/json"}
        return self.made.send(f"/{policy}{path}", method="POST", body=data, headers=headers).status

    def settle(self, policy: str) -> int:
        """The tokens that the newest request has paid, once that is known."""
        labels = {"policy": policy, "mode": "enforce", "rule": "r"}

        def read() -> float:
            return self.made.replicas[0].metric("budget_used_total", **labels)

        used: float = eventually(lambda: read() if read() > self._used[policy] else None, "a settlement")
        paid, self._used[policy] = used - self._used[policy], used
        return round(paid)


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    """One for all tests."""
    with open_before_model(POLICIES) as opened:
        yield Shop(*opened)


@pytest.mark.parametrize("headers", [{}, {"connection": "x-api-key", "x-api-key": "k"}, {"x-api-key": ""}])
def test_callers_that_hide_their_key_pay_or_are_refused(headers: dict[str, str]) -> None:
    """Envoy removes what `Connection` names before any filter sees it."""
    with stack(POLICIES) as made:
        shared = [made.send("/shared/x", method="POST", body=b"{}", headers=headers).status for _ in range(8)]
        strict = [made.send("/strict/x", method="POST", body=b"{}", headers=headers).status for _ in range(2)]

        assert shared == [200] * 3 + [429] * 5
        assert strict == [400, 400]


@pytest.mark.parametrize("begun", [False, True])
def test_clients_that_leave_pay_what_they_reserved(shop: Shop, begun: bool) -> None:  # a parameter
    """Before an answer, or after its first event; those who come after nine of them find no room."""
    key, came, gone = f"leaver-{begun}", threading.Event(), threading.Event()

    def wait() -> bytes:
        came.set()
        gone.wait(PATIENCE)
        return b"data: [DONE]\n\n"

    reply = stream(DELTA)._replace(parts=[*stream(DELTA).parts, wait]) if begun else stream(DELTA)._replace(before=wait)
    body = json.dumps({"model": "m", "max_tokens": 990, "messages": [{"role": "user", "content": "x" * 40}]}).encode()
    head = f"POST /plain{CHAT} HTTP/1.1\r\nhost: h\r\nx-api-key: {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    shop.model.reply = reply
    paid = []
    for _ in range(10):
        came.clear()
        with shop.made.connect() as client:
            client.sendall(head.encode() + body)
            assert came.wait(PATIENCE)
            if begun:
                assert client.recv(4_000).startswith(b"HTTP/1.1 200")
        paid.append(shop.settle("plain"))
    gone.set()

    assert paid == [1_000] * 10
    assert shop.ask("plain", key, whole(usage=CHAT_USAGE)) == 429


def test_streams_without_usage_pay_for_what_came_back(shop: Shop) -> None:
    """8,000 characters in an event are 2,000 tokens; the sixth finds no room."""
    event = {"choices": [{"index": 0, "delta": {"content": "x" * 8_000}}]}
    statuses = []
    for _ in range(8):
        statuses.append(shop.ask("plain", "streamer", stream(event), stream=True))
        if statuses[-1] == 200:
            assert shop.settle("plain") == pytest.approx(2_025, abs=20)

    assert statuses == [200] * 5 + [429] * 3


def test_a_rule_makes_streams_report_their_usage(shop: Shop) -> None:
    """The model is asked, and its answer is charged to the token."""
    reply = stream(DELTA, {**DELTA, "choices": [], "usage": CHAT_USAGE}, "[DONE]")

    assert shop.ask("asks", "ann", reply, stream=True) == 200
    assert json.loads(shop.model.body)["stream_options"] == {"include_usage": True}
    assert shop.settle("asks") == 1_234


@pytest.mark.parametrize(
    "kind",
    [
        *("application/json", "application/vnd.api+json", "application/problem+json; charset=utf-8", "text/json;charset=utf-8"),
        *("Application/JSON", "application/json ; charset=utf-8", ""),
    ],
)
@pytest.mark.parametrize("sized", [False, True])
def test_usage_is_read_from_any_json(shop: Shop, kind: str, sized: bool) -> None:  # a parameter
    """Also if its type is missing, and whether its length is known or not."""
    reply = whole(usage=CHAT_USAGE)._replace(kind=kind, whole=sized)

    assert shop.ask("plain", f"{kind}{sized}", reply) == 200
    assert shop.settle("plain") == 1_234


def test_a_body_without_a_type_that_is_no_json_passes_unchanged(shop: Shop) -> None:
    """It pays for its size, four bytes a token."""
    assert shop.ask("plain", "text", Reply([b"a" * 4_000], "")) == 200
    assert shop.settle("plain") == 1_000 + len(shop.model.body) // 4


@pytest.mark.parametrize("path", [";:countTokens", ";x=1", "%3B:countTokens", "%3F:countTokens"])
def test_a_path_parameter_is_no_way_to_pay_nothing(shop: Shop, path: str) -> None:
    """Servers that know path parameters answer as without it."""
    gemini = f"/v1beta/models/gemini-2.5-pro:generateContent{path}"

    assert shop.ask("plain", path, whole(usage=CHAT_USAGE), gemini) == 200
    assert shop.settle("plain") == 1_234


def test_one_absurd_answer_does_not_use_up_the_week(shop: Shop) -> None:
    """It is counted, and pays what was reserved."""
    usage = {"prompt_tokens": 10, "completion_tokens": 999_999_999, "prompt_tokens_details": {"cached_tokens": 999_999_999}}

    assert shop.ask("plain", "absurd", whole(usage=usage), max_tokens=990) == 200
    assert shop.settle("plain") == 1_000
    assert shop.made.replicas[0].metric("absurd_usage_total") == 1
    assert shop.ask("plain", "absurd", whole(usage=CHAT_USAGE)) == 200
