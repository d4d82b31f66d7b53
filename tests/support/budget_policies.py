import json
from collections.abc import Sequence
from typing import Any

from extproc.ext_proc.access_log import read_message
from extproc.ext_proc.service import Service
from extproc.metrics import Metrics
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.store.memory import MemoryStore
from tests.support.envoy_logs import log
from tests.support.service import CHAT, ask as service_ask, headers_of, make_service, metadata_of

# 2026-11-26, a Thursday, in milliseconds.
NOON = 1_795_694_400_000

REJECT = [{"threshold_percent": 100, "action": "reject"}]
KEY = ["header:x-api-key"]


def rule(
    algorithm: str,
    name: str = "r",
    keys: Sequence[str] = KEY,
    more: Any = None,  # noqa: ANN401  # further keys
    **config: object,
) -> dict[str, Any]:
    made = {"name": name, "limit_keys": [*keys], "algorithm": algorithm, "algorithm_config": config}
    return made | (more or {})


DAY = {"period": "1d", "staged_actions": [{"threshold_percent": 50, "action": "warn"}, *REJECT]}


# Further keys
def daily(budget: float = 10, name: str = "daily", **more: Any) -> dict[str, Any]:  # noqa: ANN401
    return rule("cost_based", name, **{"budget": budget, **DAY, **more})


# Further keys
def bucket(per_second: float = 1, burst: float = 3, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    return rule("token_bucket", **more) | {
        "algorithm_config": {"tokens_per_second": per_second, "burst": burst}
    }


def limited(*rules: dict[str, Any], identity: str = "p", **spec: object) -> dict[str, Any]:
    return {"id": identity, "spec": {"selector": {"pathPrefix": "/"}, "rules": [*rules], **spec}}


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> int:
        return self.now


# Fields of Settings
def serve(*policies: dict[str, Any], **settings: Any) -> tuple[Service, Clock]:  # noqa: ANN401
    clock = Clock()
    return make_service(*policies, store=MemoryStore(Metrics(), clock=clock), **settings), clock


def ask(
    service: Service,
    key: str = "k",
    path: str = CHAT,
    content: bytes = b"{}",
    **more: Any,  # noqa: ANN401  # headers
) -> ProcessingResponse:
    return service_ask(service, content, path, x_api_key=key, **more)


def refused(answer: ProcessingResponse) -> str:
    return (
        headers_of(answer).get("X-Fairvisor-Reason", "")
        if answer.HasField("immediate_response")
        else ""
    )


def warning_of(answer: ProcessingResponse) -> bytes | None:
    responses = answer.request_headers.response, answer.request_body.response
    options = [item for response in responses for item in response.header_mutation.set_headers]
    return next(
        (item.header.raw_value for item in options if item.header.key == "X-Fairvisor-Warning"),
        None,
    )


def chat(text: str, **more: object) -> bytes:
    return json.dumps(
        {"model": "gpt-4o", "messages": [{"role": "user", "content": text}], **more}
    ).encode()


# See `add_entry`
def tell(service: Service, answer: ProcessingResponse, **entry: Any) -> None:  # noqa: ANN401
    settle(service, sessions=json.loads(metadata_of(answer)["sessions"]), **entry)


def settle(service: Service, **entry: Any) -> None:  # noqa: ANN401  # see `add_entry`
    for read in read_message(log(entry))[0]:
        service.settle_entry(read)


def tokens_left(service: Service) -> int:
    return int(metadata_of(ask(service, content=chat("", max_tokens=1)))["ratelimit_remaining"]) + 1
