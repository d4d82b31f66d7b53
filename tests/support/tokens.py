import base64
import hashlib
import hmac
import json
from typing import Any

SECRET = b"a key that only this test knows, and long enough for HS256"


def encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


KEY = {"kty": "oct", "alg": "HS256", "kid": "k", "k": encode(SECRET)}


# Whatever a claim holds
def sign(key: bytes = SECRET, **claims: Any) -> dict[str, str]:  # noqa: ANN401
    payload = {"exp": 4_000_000_000, **claims}
    parts = [encode(json.dumps(part).encode()) for part in ({"alg": "HS256", "kid": "k"}, payload)]
    signature = hmac.new(key, ".".join(parts).encode(), hashlib.sha256).digest()
    return {"authorization": f"Bearer {'.'.join([*parts, encode(signature)])}"}
