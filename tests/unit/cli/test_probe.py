"""What a probe's answers mean."""

from __future__ import annotations

import socket
import sys
from typing import Any
from urllib.parse import urlsplit

import pytest

from extproc.cli.main import main
from extproc.cli.probe.client import ProbeAnswer, find_http3, send
from extproc.cli.probe.spellings import HTTP_3, Spelling
from extproc.cli.probe.verdicts import Result, is_guarded, judge

PLAIN, ALIAS = Spelling("HTTP/1.1", "/a"), Spelling("//", "//a", alias=True)


def noted(*counted: str, matched: tuple[str, ...] = ("p",), **left_out: str) -> dict[str, Any]:
    """What Loopguard says."""
    return {"matched": [*matched], "counted": [*counted], "left_out": left_out}


@pytest.mark.parametrize(
    ("spelling", "reply", "said", "verdict"),
    [
        (PLAIN, ProbeAnswer(429), noted("p"), "guarded"),
        (PLAIN, ProbeAnswer(200, reached=True), noted("p"), "guarded"),
        (PLAIN, ProbeAnswer(200, reached=True), noted(p="bypass"), "guarded"),
        (PLAIN, ProbeAnswer(200, reached=True), noted(p="body_truncated"), "UNGUARDED"),
        (PLAIN, ProbeAnswer(200, reached=True), noted(matched=()), "UNGUARDED"),
        (PLAIN, ProbeAnswer(200), None, "UNGUARDED"),  # where Envoy is told to hide its headers
        (PLAIN, ProbeAnswer(500, reached=True), None, "UNGUARDED"),
        (PLAIN, ProbeAnswer(413), noted(), "stopped"),
        (PLAIN, ProbeAnswer(307), None, "stopped"),
        (PLAIN, ProbeAnswer(0, error="reset"), None, "stopped"),
        (PLAIN, ProbeAnswer(0, error="aioquic is not installed", sent=False), None, "NOT SENT"),
        (ALIAS, ProbeAnswer(404, reached=True), None, "no such path"),
        (ALIAS, ProbeAnswer(400, reached=True), None, "UNGUARDED"),
    ],
)
def test_a_verdict(spelling: Spelling, reply: ProbeAnswer, said: dict[str, Any] | None, verdict: str) -> None:
    """What Loopguard counts or leaves out on purpose is guarded; what passes otherwise is not."""
    assert judge(spelling, reply, said, ProbeAnswer(200, reached=True))[0] == verdict


def test_an_alias_with_the_usual_answer_is_served() -> None:
    """An upstream that answers 404 to every probe, such as for its unknown model, may serve the alias as well."""
    assert judge(ALIAS, ProbeAnswer(404, reached=True), None, ProbeAnswer(404, reached=True))[0] == "UNGUARDED"


@pytest.mark.parametrize("verdict", ["UNGUARDED", "NOT SENT"])
def test_what_may_pass_unguarded_has_to_be_ignored(verdict: str) -> None:
    """A request that could not be sent may be unguarded as well."""
    found = [
        Result("http://a/", "/a", PLAIN, ProbeAnswer(200), "guarded", ""),
        Result("http://a/", "/a", PLAIN._replace(name="HTTP/3"), ProbeAnswer(0), verdict, ""),
    ]

    assert is_guarded(found[:1], [])
    assert not is_guarded(found, [])
    assert is_guarded(found, ["HTTP/3"])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--probe", "example.com/a"], "--probe must be http(s)://HOST[:PORT][/PATH], not 'example.com/a'"),
        (["--probe", "http://a b/"], "--probe must be"),
        (["--probe", "http://a/", "-H", "x"], "--header must be 'NAME: VALUE', not 'x'"),
        (["--probe", "http://a/", "--loopguard", "http://127.0.0.1:1"], "set --loopguard to a running server"),
    ],
)
def test_a_bad_command_line_is_told(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says what would be right, before any request is sent."""
    code = main(["check-envoy", *flags])
    error = capsys.readouterr().err

    assert code in (1, 2)
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("url", "offers", "address"),
    [
        ("https://a.example/", 'h3=":443"; ma=86400', ("a.example", 443)),
        ("https://a.example:8443/", 'h2=":1", h3="b.example:8443"; ma=1, h3-29=":2"', ("b.example", 8443)),
        ("https://[::1]/", 'h3="[::1]:443"', ("::1", 443)),
        ("https://a.example/", 'h3-29=":443"', None),
        ("https://a.example/", 'h3=":65536"', None),
        ("https://a.example/", "clear", None),
        ("https://a.example/", "", None),
        ("http://a.example/", 'h3=":443"', None),
    ],
)
def test_http3_is_offered_in_a_header(url: str, offers: str, address: tuple[str, int] | None) -> None:
    """`alt-svc` names a port, and another host if it is not the URL's."""
    assert find_http3(urlsplit(url), offers) == address


def test_http3_is_not_sent_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the probe needs it, so it is optional; the answer says how to get it."""
    monkeypatch.setitem(sys.modules, "extproc.cli.probe.http3", None)
    reply = send(urlsplit("https://a.example/"), Spelling("HTTP/3", "/", version=HTTP_3), [], 1, ("127.0.0.1", 1))

    assert not reply.sent
    assert "pip install '.[http3]'" in reply.error


def test_nothing_listens_for_http3() -> None:
    """The answer of the system ends the wait."""
    with socket.socket(type=socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    reply = send(urlsplit("https://a.example/"), Spelling("HTTP/3", "/", version=HTTP_3), [], 30, address)

    assert (reply.status, reply.sent) == (0, True)
    assert "refused" in reply.error
