"""What `loopguard doctor` finds in real traffic, and what the other reports say about it."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from extproc.build import BUILD, describe_build
from extproc.cli.main import main
from tests.support.command import find_missing
from tests.support.documents import bundle, policy
from tests.support.harness import Loopguard, Stack, eventually, stack
from tests.support.servers import server

CHAT = "/v1/chat/completions"
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BUFFER = 65_536
POST = {"methods": ["POST"]}
BY_USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"], "missing_descriptor": "require_one"}
POLICIES = bundle(
    policy(
        "agents",
        {"pathPrefix": "/v1/", **POST},
        similarity="turns",
        max_inspect_bytes=2_048,
        **BY_USER,
    ),
    policy(
        "merged",
        {"pathPrefix": "/share/", **POST},
        limit_keys=["header:x-user-id"],
        missing_descriptor="share",
    ),
    {
        "id": "limits",
        "spec": {
            "selector": {"pathPrefix": "/limited/", **POST},
            **BY_USER,
            "session_limits": {"max_steps": 3},
        },
    },
    {
        "id": "passing",
        "spec": {
            "selector": {"pathPrefix": "/bypass/", **POST},
            **BY_USER,
            "bypass": [{"header": "x-internal"}],
            "loop_detection": {
                "enabled": True,
                "window_seconds": 60,
                "threshold_identical_requests": 5,
            },
        },
    },
)
ANN = {"x-user-id": "ann"}


class Doctor:
    def __init__(self, capsys: pytest.CaptureFixture[str], *replicas: Loopguard) -> None:
        asked = [part for replica in replicas for part in ("--admin", replica.admin_url)]
        capsys.readouterr()
        self.code = main(["doctor", "--json", *asked])
        self.reports: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        assert main(["doctor", *asked]) == self.code
        self.text = capsys.readouterr().out

    def find(self, reason: str) -> dict[str, Any]:
        (found,) = self.find_all(reason)
        return found

    def find_all(self, reason: str) -> list[dict[str, Any]]:
        return [
            finding
            for report in self.reports
            for finding in report["findings"]
            if finding["reason"] == reason
        ]


@pytest.fixture(scope="module")
def made() -> Iterator[Stack]:
    with stack(POLICIES, body_mode="tolerant", buffer_limit=BUFFER) as running:
        yield running


def send(made: Stack, target: str, body: object = HELLO, **headers: str) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    assert made.send(target, method="POST", body=data, headers=named).status == 200


def test_doctor_reports_that_no_request_has_come(
    made: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    if made.upstream.seen:
        pytest.skip("other tests have sent requests already")
    doctor = Doctor(capsys, made.loopguard)

    assert doctor.code == 1
    assert doctor.find("no_requests")["level"] == "problem"
    assert "no request has reached Loopguard yet" in doctor.text

    main(["top", "--once", "--admin", made.loopguard.admin_url])
    assert (
        "no request has reached Loopguard yet; is the filter attached? see `loopguard doctor`"
        in flat(capsys)
    )


def test_log_readyz_and_doctor_name_the_build(
    made: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor = Doctor(capsys, made.loopguard)

    assert made.loopguard.ask("/readyz")["build"] == doctor.reports[0]["build"] == BUILD
    assert f"\nbuild: {describe_build()}\n" in doctor.text
    assert describe_build() in made.loopguard.output()
    assert describe_build("compiled") == "compiled"
    assert "LOOPGUARD_COMPILED=1" in describe_build("pure Python")


def flat(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


FINDINGS: dict[str, tuple[Callable[[Stack], None], dict[str, Any]]] = {
    "missing_descriptor": (
        lambda made: send(made, "/bypass/a"),
        {"policy": "passing", "place": "/policies/3/spec/limit_keys", "says": "header:x-user-id"},
    ),
    "shared caller": (
        lambda made: send(made, "/share/a"),
        {
            "policy": "merged",
            "place": "/policies/1/spec/limit_keys",
            "says": "so they count as one caller",
        },
    ),
    "unnamed": (
        lambda made: send(
            made, "/limited/a", {"input": "hi", "previous_response_id": "resp_1"}, **ANN
        ),
        {
            "policy": "limits",
            "place": "/policies/2/spec/session_limits",
            "says": "name no session and show no conversation",
        },
    ),
    "no_messages": (
        lambda made: send(made, "/v1/embeddings", {"input": 5}, **ANN),
        {"policy": "agents", "place": "/policies/0/spec/selector", "says": "cannot use"},
    ),
    "not_json": (
        lambda made: send(made, CHAT, b"hello", **ANN),
        {"policy": "agents", "place": "/policies/0/spec/selector", "says": "cannot use"},
    ),
    "content_encoding": (
        lambda made: send(made, CHAT, b"hello", content_encoding="gzip", **ANN),
        {"policy": "agents", "place": "/policies/0/spec/uncountable", "says": "encoding"},
    ),
    "inspect_limit": (
        lambda made: send(made, CHAT, {**HELLO, "pad": "x" * 4_096}, **ANN),
        {
            "policy": "agents",
            "place": "/policies/0/spec/loop_detection",
            "says": "max_inspect_bytes",
        },
    ),
    "body_truncated": (
        lambda made: send(made, CHAT, {**HELLO, "pad": "x" * 4 * BUFFER}, **ANN),
        {"policy": "agents", "place": "/policies/0", "says": "Envoy's buffer limit"},
    ),
    "grpc": (
        lambda made: send(
            made, CHAT, b"\0\0\0\0\0", content_type="application/grpc", te="trailers", **ANN
        ),
        {"policy": "agents", "place": "/policies/0/spec/loop_detection", "says": "streams"},
    ),
}


@pytest.mark.parametrize("reason", FINDINGS)
def test_doctor_names_unguarded_traffic_and_the_line_to_change(
    made: Stack, capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    provoke, expected = FINDINGS[reason]
    provoke(made)

    doctor = Doctor(capsys, made.loopguard)

    found = doctor.find(reason)
    assert doctor.code == 1
    assert (found["level"], found["policy"], found["mode"]) == (
        "problem",
        expected["policy"],
        "enforce",
    )
    assert found["route"].startswith("guarded:/")
    assert (
        found["place"]
        .removeprefix(str(made.folder))
        .startswith(f"/policies/policies.json: {expected['place']}")
    )
    assert expected["says"] in found["text"]
    assert 1 <= found["requests"] <= found["of"]
    assert found["change"] in doctor.text
    assert reason != "missing_descriptor" or '"credential"' in found["change"]
    assert f"on route {found['route']} ({reason})" in doctor.text


def test_shares_of_requests_add_up(made: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    before = made.loopguard.ask("/coverage")["seen"]["unmatched"]
    made.send(CHAT)
    for _ in range(3):
        send(made, CHAT, **ANN)
    report = made.loopguard.ask("/coverage")

    assert report["seen"]["unmatched"] == before + 1
    assert f"{before + 1} unmatched" in Doctor(capsys, made.loopguard).text
    for seen in (report["seen"], report["since_start"]):
        assert seen["requests"] == seen["matched"] + seen["unmatched"]
        parts = [seen[name] for name in ("guarded", "partly_guarded", "not_guarded", "exempt")]
        assert sum(parts) == seen["matched"]
        assert seen["guarded"] >= 3
    (agents,) = [row for row in report["policies"] if row["policy"] == "agents"]
    assert agents["requests"] == agents["counted"] + agents["not_counted"] + agents["exempt"]


def test_bypassed_requests_are_no_problem(made: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    send(made, "/bypass/a", x_internal="1", **ANN)

    found = Doctor(capsys, made.loopguard).find("bypass")
    assert (found["level"], found["change"], found["text"]) == (
        "note",
        None,
        "match an entry of the policy's bypass",
    )


def knows(replica: Loopguard, requests: int) -> bool:
    return bool(replica.ask("/coverage")["seen"]["matched"] == requests)


def test_every_empty_table_names_doctor(made: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    send(made, "/bypass/a")
    admin = ["--admin", made.loopguard.admin_url]
    (seen,) = made.loopguard.ask("/loops")["coverage"]
    assert find_missing(seen["line"], "guarded", "see `loopguard doctor`") == []

    assert main(["top", "--once", *admin]) == 0
    assert seen["line"] in flat(capsys)
    assert main(["sessions", *admin]) == 0
    assert seen["line"] in flat(capsys)
    assert [each["seen"] for each in made.loopguard.ask("/sessions")["coverage"]] == [seen["seen"]]
    assert seen["line"].split(";")[0] in made.loopguard.get("/")[1]


def test_replicas_on_one_store_are_counted_once(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        server() as valkey,
        stack(POLICIES, "--store", f"redis://{valkey.address}", replicas=2) as made,
    ):
        for _ in range(20):
            send(made, CHAT, **ANN)
        for _ in range(20):
            send(made, "/bypass/a")

        for replica in made.replicas:
            eventually(partial(knows, replica, 40), "both replicas' requests")
        doctor = Doctor(capsys, *made.replicas)
        (report,) = doctor.reports
        assert (report["seen"]["guarded"], report["seen"]["not_guarded"]) == (20, 20)
        assert len(report["replicas"]) == 2
        assert doctor.find("missing_descriptor")["requests"] == 20
        assert not [
            finding for finding in report["findings"] if finding["reason"] == "memory_store"
        ]


def test_several_servers_with_memory_stores_are_a_problem(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with stack(POLICIES, replicas=2) as made:
        for _ in range(8):
            send(made, CHAT, **ANN)

        one, both = Doctor(capsys, made.loopguard), Doctor(capsys, *made.replicas)

        assert one.code == 0, one.text
        assert " requests in the last 1 min: " in one.text
        assert {finding["level"] for report in one.reports for finding in report["findings"]} == {
            "note"
        }
        assert one.find("memory_store")["level"] == "note"
        levels = {finding["level"] for finding in both.find_all("memory_store")}
        assert (len(both.reports), levels, both.code) == (2, {"problem"}, 1)
        assert "2 servers each count separately" in both.text


def test_refused_policy_files_are_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    with stack(POLICIES) as made:
        send(made, CHAT, **ANN)
        made.write_policies("{")

        eventually(lambda: made.loopguard.ask("/policies")["refused"], "the refusal")
        doctor = Doctor(capsys, made.loopguard)

    assert doctor.code == 1
    assert "the policy files have errors" in doctor.find("policies_refused")["text"]
