import json
from collections.abc import Iterable
from typing import Any

USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}


START = 1_763_812_345.0


def make_record(
    seconds: float = 0, user: str = "ann", text: str = "again", **more: object
) -> dict[str, Any]:
    return {
        "record": 1,
        "time": START + seconds,
        "method": "POST",
        "path": "/v1/chat",
        "authority": "host",
        "headers": {"X-User-Id": user},
        "body": text,
        **more,
    }


def write_lines(lines: Iterable[object]) -> bytes:
    return b"".join(
        (line if isinstance(line, str) else json.dumps(line)).encode() + b"\n" for line in lines
    )
