"""How `check-envoy --probe` interprets responses."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.cli.probe import ProbeAnswer, ProbeRequest, Result, is_guarded, judge

PLAIN, ALIAS = ProbeRequest("HTTP/1.1", "/a"), ProbeRequest("dot segments", "/b/../a", alias=True)


def noted(*counted: str, matched: tuple[str, ...] = ("p",), **left_out: str) -> dict[str, Any]:
    """Loopguard's own record of a request."""
    return {"matched": [*matched], "counted": [*counted], "left_out": left_out}


@pytest.mark.parametrize(
    ("request_", "reply", "said", "verdict"),
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
        (ALIAS, ProbeAnswer(404, reached=True), None, "no such path"),
        (ALIAS, ProbeAnswer(400, reached=True), None, "UNGUARDED"),
        (ALIAS, ProbeAnswer(405, reached=True), None, "UNGUARDED"),  # as the usual path is answered
    ],
)
def test_response_gives_the_verdict(
    request_: ProbeRequest, reply: ProbeAnswer, said: dict[str, Any] | None, verdict: str
) -> None:
    assert judge(request_, reply, said, ProbeAnswer(405, reached=True))[0] == verdict


def test_unguarded_result_fails_unless_ignored() -> None:
    found = [
        Result("http://a/", "/a", PLAIN, ProbeAnswer(200), "guarded", ""),
        Result("http://a/", "/a", PLAIN._replace(name="HTTP/2"), ProbeAnswer(0), "UNGUARDED", ""),
    ]

    assert is_guarded(found[:1], [])
    assert not is_guarded(found, [])
    assert is_guarded(found, ["HTTP/2"])
