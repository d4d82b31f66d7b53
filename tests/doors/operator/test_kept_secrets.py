"""Secrets that clients send through the real Envoy are in no output and not in the store."""

import json
import secrets
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.main import main
from extproc.request.fingerprint import hash_tenant
from tests.support.documents import bundle, policy
from tests.support.harness import eventually, stack
from tests.support.pages import look_around
from tests.support.servers import Server, server

CHAT, MESSAGES, GEMINI, BEDROCK = (
    "/v1/chat/completions",
    "/v1/messages",
    "/v1beta/models/m:generateContent",
    "/model/m/converse",
)
NAMES = ["authorization", "proxy-authorization", "cookie", "x-api-key", "api-key", "x-goog-api-key"]
GATEWAYS = [
    "ocp-apim-subscription-key",
    "x-litellm-api-key",
    "x-portkey-api-key",
    "cf-aig-authorization",
    "helicone-auth",
    "x-amz-security-token",
    "private-token",
    "x-vault-token",
    "apikey",
]
PARAMETERS = ["api_key", "access_token", "clientSecret"]
THEIRS = [*(f"header:{name}" for name in GATEWAYS), *(f"query:{name}" for name in PARAMETERS)]
CALLER = {"first_of": ["jwt:sub", "credential", "header:x-user-id"], "name": "caller"}
KEYS = ["credential", *(f"header:{name}" for name in NAMES), "query:key"]
ANY = {"pathPrefix": "/"}
LABELS: dict[str, Any] = {"labels": ["header:x-team", "header:authorization", "query:key"]}

CHAINS = policy(
    "chains",
    ANY,
    limit_keys=[CALLER],
    similarity="turns",
    action="warn",
    count_failed=False,
    session={},
    **LABELS,
)
CHAINS["spec"] |= {"session_limits": {"max_steps": 50}, "unnamed_limits": {"max_steps": 50}}

POLICIES = bundle(
    CHAINS,
    policy("plain", ANY, limit_keys=KEYS, action="warn", **LABELS),
    policy(
        "new",
        ANY,
        mode="shadow",
        canary_of="plain",
        limit_keys=KEYS,
        threshold_identical_requests=2,
    ),
    policy(
        "caller",
        ANY,
        limit_keys=[CALLER],
        action="warn",
        enforce_percent=50,
        ramp_by=["credential"],
        **LABELS,
    ),
    policy(
        "gateways",
        {"pathPrefix": "/gateway"},
        limit_keys=[*THEIRS, "header:x-team"],
        labels=THEIRS[:8],
        action="warn",
    ),
    policy(
        "first",
        {"pathPrefix": "/gateway"},
        limit_keys=[{"first_of": THEIRS, "name": "caller"}],
        action="warn",
    ),
    policy(
        "sessions",
        ANY,
        limit_keys=["credential"],
        similarity="turns",
        action="steer",
        session={"keys": ["header:cookie", "credential"]},
        session_limits={"max_steps": 4},
        **LABELS,
    ),
)


def make_requests(secret: str) -> Iterator[tuple[str, dict[str, str]]]:
    for path in (CHAT, MESSAGES, GEMINI, BEDROCK, "/other"):
        yield path, {"authorization": f"Bearer {secret}"}
    yield (
        BEDROCK,
        {
            "authorization": (
                "AWS4-HMAC-SHA256 "
                f"Credential={secret}/20260101/r/bedrock/aws4_request, "
                f"Signature={secret}"
            )
        },
    )
    yield CHAT, {"authorization": f"Basic {secret}", "cookie": f"session={secret}"}
    for name in NAMES[1:]:
        yield CHAT, {name: secret}
        yield MESSAGES, {name: secret, "x-user-id": "ann"}
    yield CHAT, dict.fromkeys(NAMES, secret)
    yield (
        f"{GEMINI}?key={secret}&alt=sse",
        {"x-api-key": secret, "authorization": f"Bearer {secret}"},
    )
    yield f"{GEMINI}?key={secret}&alt=sse", {}
    yield f"/other?a=b&key={secret}", {}
    for name in GATEWAYS:
        yield "/gateway", {name: f"Bearer {secret}"}
    for name in PARAMETERS:
        yield f"/gateway?a=b&{name}={secret}", {}


def make_body() -> bytes:
    turn = [
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "no such file, again and again"},
    ]
    return json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "go"}, *turn * 4]}
    ).encode()


def list_spellings(secret: str) -> list[bytes]:
    """The secret, and hashes of it that need no key."""
    values = [secret, f"Bearer {secret}", f"Basic {secret}", f"session={secret}"]
    plain = [blake2b(value.encode(), digest_size=8).hexdigest() for value in values]
    named = [
        hash_tenant(f"{name}={value}") for value in values for name in ("credential", "key", *NAMES)
    ]
    return [found.encode() for found in (secret, *plain, *named)]


def read_store(valkey: Server) -> Iterator[bytes]:
    """All keys and values of a store, packed ones unpacked as well."""
    client = valkey.client()
    readers: dict[bytes, Any] = {
        b"string": client.get,
        b"hash": client.hgetall,
        b"list": lambda key: client.lrange(key, 0, -1),
        b"set": client.smembers,
        b"zset": lambda key: client.zrange(key, 0, -1),
    }
    for key in client.keys("*"):
        yield key
        value = readers[client.type(key)](key)
        parts = (
            [value]
            if isinstance(value, bytes)
            else [*value, *value.values()]
            if isinstance(value, dict)
            else list(value)
        )
        for part in parts:
            yield part
            with suppress(zlib.error):
                yield zlib.decompress(part)


@pytest.mark.parametrize("transport", ["fast", "grpcio"])
def test_secrets_are_in_no_store_page_or_log(
    transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    secret, body = f"sk-{secrets.token_hex(20)}", make_body()
    requests = list(make_requests(secret))
    flags = ["--record", "--show-callers", "--log-level", "debug", "--transport", transport]
    with server() as valkey, tempfile.TemporaryDirectory(prefix="lg") as name:
        events, tokens = Path(name) / "events.jsonl", Path(name) / "tokens"
        tokens.write_text("correct-horse-battery-staple\n")
        store = [
            "--store",
            f"redis://{valkey.address}",
            "--events",
            str(events),
            "--admin-token-file",
            str(tokens),
        ]
        with stack(POLICIES, *flags, *store, replicas=2) as made:
            for path, headers in requests:
                for _ in range(6):
                    made.send(path, method="POST", body=body, headers={**headers, "x-team": "blue"})
            admin = ["--admin", made.loopguard.admin_url]
            assert (
                main(
                    [
                        "block",
                        *admin,
                        "--token-file",
                        str(tokens),
                        "--caller",
                        f"authorization=Bearer {secret}",
                    ]
                )
                == 0
            )
            assert (
                main(
                    [
                        "block",
                        *admin,
                        "--token-file",
                        str(tokens),
                        "--caller",
                        f"credential={secret}",
                    ]
                )
                == 0
            )

            bearer = {"authorization": f"Bearer {secret}"}
            eventually(  # each replica asks for orders once a second
                lambda: (
                    b"(blocked)" in made.send(CHAT, method="POST", body=body, headers=bearer).body
                ),
                "the order at each replica",
            )
            for command in (["top", "--once"], ["top", "--json"], ["sessions"], ["overrides"]):
                assert main([*command, *admin]) == 0
            assert main(["doctor", *admin]) in (0, 1)
            eventually(lambda: events.exists() and b"loop.began" in events.read_bytes(), "events")
            eventually(
                lambda: made.envoy.output().count("loop_record") >= len(requests),
                "records in the access log",
            )
            places = [
                ("the commands", "".join(capsys.readouterr()).encode()),
                *look_around(made, events),
            ]
            places += [("the store", part) for part in read_store(valkey)]
            assert any(
                secret in (seen.header("authorization") or "") for seen in made.upstream.seen
            )
            policies = ["--policy", str(made.folder / "policies")]
            for path, headers in requests:
                given = [flag for item in headers.items() for flag in ("-H", ": ".join(item))]
                assert (
                    main(["explain", *policies, *given, "-d", body.decode(), f"http://h{path}"])
                    == 0
                )
            assert main(["replay", *policies, "--json", str(made.folder / "envoy.log")]) == 0
            places.append(("explain and replay", "".join(capsys.readouterr()).encode()))

    assert any(b"blue" in text for _, text in places)
    for spelling in list_spellings(secret):
        assert [place for place, text in places if spelling in text] == []
