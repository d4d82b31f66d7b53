"""Access logs of Envoy, replayed with the policies that decided them, and a replay's memory."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.main import main
from tests.support.access_logs import USER, make_record, write_lines
from tests.support.command import written
from tests.support.documents import bundle, policy
from tests.support.engine import ANY
from tests.support.harness import Stack, eventually, stack

KEYS = ["header:x-user-id", "ip:address"]
POLICIES = bundle(
    policy("reject", {"pathPrefix": "/reject"}, limit_keys=KEYS, cooldown_seconds=60),
    policy(
        "skip", {"pathPrefix": "/reject"}, limit_keys=["header:x-team"], missing_descriptor="skip"
    ),
    policy(
        "warn",
        {"pathPrefix": "/warn", "hosts": ["api.example.com"]},
        action="warn",
        limit_keys=["query:user"],
    ),
    policy(
        "throttle",
        {"pathPrefix": "/throttle"},
        action="throttle",
        max_delay_ms=100,
        limit_keys=KEYS,
    ),
    policy(
        "log",
        {"pathPrefix": "/log"},
        window_type="sliding_log",
        count_refused=False,
        limit_keys=KEYS,
    ),
    policy("bodiless", {"pathPrefix": "/bodiless"}, body="ignore", limit_keys=KEYS),
    policy(
        "canary",
        {"pathPrefix": "/"},
        mode="shadow",
        threshold_identical_requests=2,
        limit_keys=KEYS,
    ),
    policy("turns", {"pathPrefix": "/turns"}, similarity="turns", limit_keys=KEYS),
)

WORDS = {"refused": "reject", "throttled": "throttle", "steered": "steer", "warned": "warn"}


@pytest.fixture(scope="module")
def recorded() -> Iterator[Stack]:
    with stack(POLICIES, "--record") as made:
        yield made


def send_traffic(gate: Stack) -> int:
    sent = 0
    for path in ("/reject/a", "/warn/a", "/throttle/a", "/log/a", "/bodiless/a", "/turns"):
        for number in range(5):
            for user in ("ann", "bob"):
                headers = {"x-user-id": user, "host": "api.example.com"} | (
                    {"x-team": "t"} if number % 2 else {}
                )
                body = json.dumps({"messages": ["again" if user == "ann" else number]}).encode()
                gate.send(
                    f"{path}?user={user}&b=%7C%3D+x", method="POST", body=body, headers=headers
                )
                gate.send(f"{path}?user={user}", headers=headers)
                sent += 2
    grpc = {"content-type": "application/grpc", "te": "trailers"}
    for _ in range(4):  # streams: no request waits for their bodies
        gate.send(
            "/reject/grpc",
            method="POST",
            body=iter([b"x"]),
            headers={"x-user-id": "ann", "x-team": "t", **grpc},
        )
    return sent + 4


def read_log(gate: Stack, sent: int) -> list[dict[str, Any]]:
    def probe() -> list[dict[str, Any]] | None:
        lines = [
            line
            for line in gate.envoy.output().splitlines()
            if line.startswith("{") and line.endswith("}")
        ]
        return [json.loads(line) for line in lines] if len(lines) >= sent else None

    return eventually(probe, f"{sent} lines in the access log")


def test_replayed_access_log_gives_the_same_decisions(
    recorded: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = recorded
    sent = send_traffic(gate)
    entries = read_log(gate, sent)
    log = gate.folder / "envoy.log"

    code = main(["replay", "--policy", str(gate.folder / "policies"), "--json", str(log)])
    document = json.loads(capsys.readouterr().out)

    assert code == 0
    assert document["log"]["requests"] == sent == len(entries)
    found = {item["policy"]: item for item in document["policies"]}
    for name, item in found.items():
        metric = partial(gate.loopguard.metric, policy=name)
        assert {word: item[word] for word in WORDS} == {
            word: metric("requests_total", action=action) for word, action in WORDS.items()
        }
        assert item["requests"] == metric("requests_total")
        assert sum(item["uncounted"].values()) == metric("uncounted_total")
        if name != "turns":
            assert item["uncounted"] == {
                why: metric("uncounted_total", reason=why) for why in item["uncounted"]
            }
    assert [found[name]["refused"] > 0 for name in ("reject", "log", "bodiless", "canary")] == [
        True
    ] * 4
    assert found["reject"]["uncounted"]["grpc"] == 4
    assert (found["turns"]["requests"], found["turns"]["uncounted"]) == (
        0,
        {"no_body": 10, "no_messages": 10},
    )
    assert Counter(entry.get("loop_action") for entry in entries)["reject"] == sum(
        item["refused"] for item in document["policies"] if item["mode"] == "enforce"
    )


def test_access_log_names_no_caller(recorded: Stack) -> None:
    recorded.send("/reject/secret?user=carol&key=s3cret", headers={"x-user-id": "carol"})

    record = recorded.envoy.logged("/reject/secret?user=carol&key=s3cret")["loop_record"]

    assert set(record["headers"]) == {"x-user-id", "x-team"}
    assert record["headers"]["x-team"] is None
    assert record["path"] == "/reject/secret"
    assert record["address"] not in ("", "127.0.0.1")
    assert [word for word in ("carol", "s3cret") if word in json.dumps(record)] == []


def test_show_callers_records_names_and_live_fingerprints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stack(POLICIES, "--record", "--show-callers") as gate:
        for _ in range(3):
            gate.send("/reject/plain?x=1", headers={"x-user-id": "ann"})
        entry = gate.envoy.logged("/reject/plain?x=1", loop_action="reject")
        log = tmp_path / "access.log"
        log.write_text(gate.envoy.output())

    assert (
        main(
            [
                "replay",
                "--policy",
                written(tmp_path / "policies.json", POLICIES),
                "--json",
                str(log),
            ]
        )
        == 0
    )
    worst = json.loads(capsys.readouterr().out)["worst"]

    assert entry["loop_record"]["headers"]["x-user-id"] == "ann"
    assert (entry["fingerprint"], entry["tenant"]) in [
        (item["fingerprint"], item["tenant"]) for item in worst
    ]


@pytest.mark.deep
def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    (tmp_path / "policies.json").write_text(
        json.dumps(bundle(policy("p", ANY, window_seconds=1, **USER)))
    )
    peaks = []
    for count in (5_000, 50_000):
        log = tmp_path / "access.log"
        log.write_bytes(
            write_lines(
                make_record(n / 300, f"u{n // 3}", path=f"/v1/{n // 3}") for n in range(count)
            )
        )
        code = (
            "import re, sys; from extproc.cli.main import main; main(sys.argv[1:]);"
            # Of this program alone: getrusage() begins with what the process was before, a copy of
            # the one that tests.
            "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1], "
            "file=sys.stderr)"
        )
        arguments = ["replay", "--policy", str(tmp_path / "policies.json"), "--json", str(log)]
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments],
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout)["policies"][0]["loops"] == count // 3
        peaks.append(int(done.stderr.split()[-1]) / 1024)

    assert peaks[1] - peaks[0] < 20
