"""Orders over the admin port and its socket, by commands and by unauthorized clients."""

import http.client
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.main import main
from tests.support.command import find_missing
from tests.support.documents import bundle, policy
from tests.support.harness import PATIENCE, Loopguard, write_policies
from tests.support.pages import TOKEN, Tab

USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
BLOCK = {"kind": "block", "caller": {"x-user-id": "ann"}, "seconds": 60}
JSON = {"content-type": "application/json"}
AGENTS = ["--agents", "5", "--depth", "1", "--concurrent-agents", "2", "--spawns-per-minute", "3"]
GOOD = {**JSON, "authorization": f"Bearer {TOKEN}"}


class Running:
    def __init__(self, folder: Path, *arguments: str) -> None:
        self.tokens = folder / "tokens"
        self.tokens.write_text(f"{TOKEN}\n")
        self.socket = folder / "admin.sock"
        write_policies(folder, bundle(policy("p", {"pathPrefix": "/"}, **USER)))
        self.loopguard = Loopguard(folder, "--admin-socket", str(self.socket), *arguments)
        self.url = self.loopguard.admin_url

    def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.loopguard.admin_port, timeout=PATIENCE
        )
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def list_standing(self) -> list[dict[str, Any]]:
        standing: list[dict[str, Any]] = self.ask("GET", "/overrides")[1]["overrides"]
        return standing


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="lg") as name:
        folder = Path(name)
        made = Running(folder, "--admin-token-file", str(folder / "tokens"))
        yield made
        made.loopguard.stop()


@pytest.fixture(scope="module")
def reading() -> Iterator[Running]:
    """One without, to which other machines can connect."""
    with tempfile.TemporaryDirectory(prefix="lg") as name:
        made = Running(Path(name), "--admin", "0.0.0.0:0")
        yield made
        made.loopguard.stop()


def test_order_is_given_listed_and_revoked_once(running: Running) -> None:
    status, given = running.ask(
        "POST",
        "/overrides",
        BLOCK | {"reason": "runaway"},
        GOOD | {"x-loopguard-operator": "eve@x"},
    )

    assert status == 201
    assert (given["kind"], given["reason"], given["who"], given["notes"]) == (
        "block",
        "runaway",
        "eve@x (token)",
        [],
    )
    assert [override["override"] for override in running.list_standing()] == [given["override"]]
    name = given["override"]
    assert running.ask("DELETE", f"/overrides/{name}", headers=GOOD) == (200, {"revoked": name})
    assert running.ask("DELETE", f"/overrides/{name}", headers=GOOD)[0] == 404
    assert running.list_standing() == []
    assert re.search(
        r"override given override=\w+ kind=block .*who=\"eve@x \(token\)\"",
        running.loopguard.output(),
    )
    assert "override revoked" in running.loopguard.output()


REFUSED: dict[str, tuple[dict[str, str], int]] = {
    "no token": (JSON, 401),
    "a wrong token": (JSON | {"authorization": f"Bearer {TOKEN}x"}, 401),
    "half of the token": (JSON | {"authorization": f"Bearer {TOKEN[:-1]}"}, 401),
    "an empty token": (JSON | {"authorization": "Bearer "}, 401),
    "bytes that are no text": (JSON | {"authorization": "Bearer \xff\xfe"}, 401),
    "another scheme": (JSON | {"authorization": f"Basic {TOKEN}"}, 401),
    "a cookie": (JSON | {"cookie": f"token={TOKEN}"}, 401),
    "a page": (GOOD | {"origin": "http://127.0.0.1:9900"}, 403),
    "a page of nowhere": (GOOD | {"origin": "null"}, 403),
    "a browser": (GOOD | {"sec-fetch-site": "same-origin"}, 403),
    "a form": (GOOD | {"content-type": "application/x-www-form-urlencoded"}, 415),
    "a form that is text": (GOOD | {"content-type": "text/plain"}, 415),
    "no content type": ({"authorization": f"Bearer {TOKEN}"}, 415),
}


@pytest.mark.parametrize(("headers", "status"), REFUSED.values(), ids=REFUSED)
def test_client_without_credential_changes_nothing(
    running: Running, headers: dict[str, str], status: int
) -> None:
    refused, said = running.ask("POST", "/overrides", BLOCK, headers)

    assert (refused, bool(said["error"])) == (status, True)
    assert running.ask("DELETE", "/overrides/x", headers=headers)[0] in (status, 404)
    assert (
        running.ask(
            "OPTIONS", "/overrides", headers={**headers, "access-control-request-method": "POST"}
        )[0]
        == 405
    )
    assert running.list_standing() == []


def test_admin_socket_needs_no_token(reading: Running, capsys: pytest.CaptureFixture[str]) -> None:
    admin = f"unix:{reading.socket}"

    assert (
        main(
            [
                "block",
                "--caller",
                "x-user-id=ann",
                "--for",
                "2m",
                "--reason",
                "runaway",
                "--admin",
                admin,
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    (standing,) = reading.list_standing()
    assert said == f"block {standing['override']} until {standing['ends']}\n"
    assert standing["who"].endswith("(socket)")
    assert standing["reason"] == "runaway"
    assert reading.socket.stat().st_mode & 0o777 == 0o600
    assert main(["overrides", "--admin", admin]) == 0
    assert standing["override"] in capsys.readouterr().out
    assert main(["overrides", "--revoke", standing["override"], "--admin", admin]) == 0
    assert reading.list_standing() == []


def test_replaced_token_file_is_read_again(running: Running) -> None:
    try:
        running.tokens.write_text("another-token-of-good-length\n\nand-a-second-one-beside-it\n")
        assert running.ask("DELETE", "/overrides/x", headers=GOOD)[0] == 401
        second = {"authorization": "bearer and-a-second-one-beside-it"}
        assert running.ask("DELETE", "/overrides/x", headers=second)[0] == 404
        for broken in ("", "short\n"):
            running.tokens.write_text(broken)
            assert (
                running.ask("DELETE", "/overrides/x", headers={"authorization": "Bearer short"})[0]
                == 503
            )
        running.tokens.unlink()
        assert running.ask("DELETE", "/overrides/x", headers=second)[0] == 503
    finally:
        running.tokens.write_text(TOKEN)
    assert running.ask("DELETE", "/overrides/x", headers=GOOD)[0] == 404


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["block"], "give a target: --caller, --session, --fingerprint or --tool"),
        (
            ["allow", "--tool", "t", "--for", "soon"],
            "--for must be a number with a unit, such as 90s, 30m, 2h or 1d, not",
        ),
        (["allow", "--tool", "t", "--for", "60d"], "--for is at most 30d, not 60d"),
        (["kill", "--session", "a=b", "--for", "721h"], "--for is at most 30d, not 721h"),
        (
            ["allow", "--caller", "a=b", "--caller", "hash"],
            "--caller must be NAME=VALUE or 16 hex digits, not 'hash'",
        ),
        (["release", "--session", "=x"], "--session must be NAME=VALUE or 16 hex digits, not '=x'"),
        (["kill", "--reason", "r"], "give a target: --caller or --session"),
        (["kill", "--tool", "t"], "unrecognized arguments: --tool t"),
        (
            ["grant", "--session", "a=b"],
            "give at least one of --steps, --tool-calls, --cost, --agents, --depth, --concurrent-",
        ),
        (
            ["grant", "--session", "a=b", "--tool", "refund"],
            "argument --tool: must be NAME=N, such as refund=1, not 'refund'",
        ),
        (
            ["grant", "--session", "a=b", "--tool", "=1"],
            "argument --tool: must be NAME=N, such as refund=1, not '=1'",
        ),
        (
            ["grant", "--session", "a=b", "--steps", "few"],
            "argument --steps: invalid int value: 'few'",
        ),
        (
            ["block", "--tool", "t", "--token-file", "/nowhere"],
            "--token-file /nowhere: cannot be read",
        ),
    ],
)
def test_invalid_command_exits_2_with_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--admin", "http://127.0.0.1:1"]) == 2
    assert message in capsys.readouterr().err


def test_command_reports_why_the_server_refused(
    running: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["block", "--tool", "t", "--admin", running.url]) == 1
    assert "401: no token given: set --token-file, or use --admin-socket" in capsys.readouterr().err
    wrong = tmp_path / "token"
    wrong.write_text("not-the-token-at-all")
    assert main(["block", "--tool", "t", "--admin", running.url, "--token-file", str(wrong)]) == 1
    assert "401: this needs a token" in capsys.readouterr().err
    good = ["--admin", running.url, "--token-file", str(running.tokens)]
    assert main(["block", "--caller", "user=ann", *good]) == 0
    said = capsys.readouterr()
    assert "note: no policy identifies callers by user; known descriptors: x-user-id" in said.err
    assert main(["overrides", "--revoke", said.out.split()[1], *good]) == 0


def test_kill_and_grant_commands_act_once(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    good = ["--admin", running.url, "--admin", running.url, "--token-file", str(running.tokens)]
    session = ["--session", "header:x-session-id=abc"]
    assert main(["kill", *session, "--caller", "x-user-id=ann", *good]) == 0
    for amount in (["--steps", "10", "--cost", "0.07"], ["--tool-calls", "1000"], AGENTS):
        assert main(["grant", *session, *amount, *good]) == 0
    assert main(["grant", *session, "--steps", "0", "--cost", "5", *good]) == 1
    said = capsys.readouterr()
    assert "steps must be a number from 1 to 1000000000, not 0" in said.err
    names = {line.split()[1] for line in said.out.splitlines()}

    assert main(["overrides", "--admin", running.url]) == 0
    listed = capsys.readouterr().out

    assert {line.split()[0] for line in listed.splitlines()} == names
    assert [line.split()[1] for line in listed.splitlines()] == ["grant", "grant", "grant", "kill"]
    assert (
        find_missing(
            listed,
            ", +10 steps, +0.07 dollars  in all policies",
            ", +1000 tool calls  in all policies",
            ", +5 agents, +1 levels of agents, +2 active agents, +3 agents in a minute  in all",
        )
        == []
    )
    for name in names:
        assert main(["overrides", "--revoke", name, *good[2:]]) == 0


def test_page_gives_and_revokes_an_order(running: Running) -> None:
    tab = Tab(running.url.removeprefix("http://"))
    with tab.client:
        tab.sign_in()
        tab.open("/order?command=loopguard block --tool deploy --for 1h")
        assert tab.submit(reason="incident 7") == 200
        (order,) = running.list_standing()
        assert tab.press("revoke") == tab.submit() == 200

    assert (order["tool"], order["who"]) == ("deploy", "ann (page)")
    assert running.list_standing() == []
    for line in ("signed in who=ann client=127.0.0.1", 'who="ann (page)"', "override revoked"):
        assert line in running.loopguard.output()


@pytest.mark.parametrize("content", [None, "", "short"])
def test_serve_refuses_an_unusable_token_file(content: str | None, tmp_path: Path) -> None:
    write_policies(tmp_path, bundle(policy("p", {"pathPrefix": "/"}, **USER)))
    if content is not None:
        (tmp_path / "tokens").write_text(content)

    with pytest.raises(AssertionError, match="--admin-token-file"):
        Loopguard(tmp_path, "--admin-token-file", str(tmp_path / "tokens"))
