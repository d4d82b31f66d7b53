"""Credentials of gateways, whatever their names, are found in no output of a real Envoy and Loopguard that show callers."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path

from extproc.cli.main import main
from tests.support.documents import bundle, policy
from tests.support.harness import eventually, stack
from tests.support.pages import look_around

HEADERS = [
    "ocp-apim-subscription-key", "x-litellm-api-key", "x-portkey-api-key", "cf-aig-authorization", "helicone-auth",
    "x-amz-security-token", "private-token", "x-vault-token", "apikey",
]  # fmt: skip
PARAMETERS = ["api_key", "access_token", "clientSecret"]
KEYS = [*(f"header:{name}" for name in HEADERS), *(f"query:{name}" for name in PARAMETERS), "header:x-team"]
POLICIES = bundle(
    policy("plain", {"pathPrefix": "/"}, limit_keys=KEYS, labels=KEYS[:7], action="warn"),
    policy("first", {"pathPrefix": "/"}, limit_keys=[{"first_of": KEYS, "name": "caller"}], action="warn"),
)


def test_no_gateways_secret_is_anywhere(tmp_path: Path) -> None:
    """Those of headers and of parameters reach the upstream, and nothing else."""
    secret = f"sk-{secrets.token_hex(20)}"
    with tempfile.TemporaryDirectory(prefix="lg") as name:
        events = Path(name) / "events.jsonl"
        flags = ["--record", "--show-callers", "--log-level", "debug", "--events", str(events)]
        with stack(POLICIES, *flags) as made:
            for _ in range(4):
                for header in HEADERS:
                    made.send("/v1/x", method="POST", body=b"{}", headers={header: f"Bearer {secret}", "x-team": "blue"})
                for parameter in PARAMETERS:
                    made.send(f"/v1/x?a=b&{parameter}={secret}", method="POST", body=b"{}", headers={"x-team": "blue"})
            eventually(lambda: events.exists() and b"loop.began" in events.read_bytes(), "events")
            eventually(lambda: made.envoy.output().count("loop_record") >= len(HEADERS), "records in the access log")
            places = list(look_around(made, events))
            (tmp_path / "log").write_text(made.envoy.output())
            assert main(["replay", "--policy", str(made.folder / "policies"), "--json", str(tmp_path / "log")]) == 0
            assert any(secret in str(seen.headers) for seen in made.upstream.seen)

    assert any(b"blue" in text for _, text in places)
    assert [place for place, text in places if secret.encode() in text] == []
