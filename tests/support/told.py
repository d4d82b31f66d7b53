"""What a service tells of single requests.

Each has a new caller, so no request knows of another.
"""

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

from extproc.ext_proc.service import Service
from extproc.pb.external_processor_pb2 import ProcessingResponse
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.service import ask, list_uncounted, make_service, metadata_of

_CALLERS = count()
_WORDS = re.compile(r"Loop detected: (.*?)(?:, so this request was refused)?\. (.*)", re.DOTALL)
_RULES = {
    "mostly the same results": "action_cycle",
    " rounds of ": "cycle",
    ", but for numbers": "similar_error",
    " change was made ": "same_change",
    " the same empty result": "nothing_found",
    " results were the same error": "error",
    " turns returned the same result": "result",
    "the prompt begins ": "nested_prompt",
    "the prompt ends ": "repeated_ending",
    " answers called no tool": "talk",
    " repeat earlier ones": "nothing_new",
    " turns were ": "repeat",
    " tool calls were ": "calls",
    "was part of a loop": "cooldown",
}


class Told(NamedTuple):
    """Outcome of a request.

    Attributes:
        action: `allow` if nothing was done.
        count: number of repetitions.
        tool: tools of the loop, separated by spaces.
        what: what repeats, in the note's words; empty without a note.
        more: the rest of the note.
        fingerprint: of what was compared.
    """

    action: str = "allow"
    count: int = 0  # type: ignore[assignment]  # hides tuple.count, which is not called
    tool: str = ""
    what: str = ""
    more: str = ""
    fingerprint: str = ""

    @property
    def rule(self) -> str:
        return next((rule for words, rule in _RULES.items() if words in self.what), "")


def read_told(answer: ProcessingResponse) -> Told:
    told = metadata_of(answer)
    changed = answer.request_body.response.body_mutation.body
    text = json.loads(f'"{_find_note(changed)}"')
    if answer.HasField("immediate_response"):
        text = json.loads(answer.immediate_response.body)["error"]["message"]
    words = _WORDS.search(text)
    what, more = words.groups() if words is not None else ("", "")
    return Told(
        told.get("action", "allow"),
        int(told.get("count", 0)),
        told.get("tool", ""),
        what,
        more,
        told.get("fingerprint", ""),
    )


def _find_note(data: bytes) -> str:
    return data.decode().rpartition("[~loopguard~")[2].partition("~loopguard:")[0]


@lru_cache(256)
def _serve(policy_keys: str) -> Service:
    return make_service(policy("p", ANY, limit_keys=["header:x-caller"], **json.loads(policy_keys)))


def serve(**keys: Any) -> Service:  # noqa: ANN401  # of `policy`
    """A service with one detector, `turns` by default. It is shared, since each caller is new."""
    return _serve(
        json.dumps(
            {
                "similarity": "turns",
                **({"incidents": False} if "similarity" not in keys else {}),
                **keys,
            }
        )
    )


def send(service: Service, value: object, caller: str = "", **named: Any) -> ProcessingResponse:  # noqa: ANN401  # of `headers`
    return ask(service, value, x_caller=caller or f"caller {next(_CALLERS)}", **named)


# Of `policy`
def tell_all(values: Iterable[object], session_id: str = "", **keys: Any) -> list[Told]:  # noqa: ANN401
    service, caller = serve(**keys), f"caller {next(_CALLERS)}"
    return [
        read_told(ask(service, each, x_caller=caller, session_id=session_id)) for each in values
    ]


def tell(value: object, **keys: Any) -> Told:  # noqa: ANN401  # of `policy`
    return tell_all([value], **keys)[0]


# Of `policy`
def tell_session(values: Iterable[object], **keys: Any) -> list[Told]:  # noqa: ANN401
    return tell_all(values, "s", session={}, **keys)


def is_loop(value: object, **keys: Any) -> bool:  # noqa: ANN401  # of `policy`
    return tell(value, **keys).action != "allow"


def find_strength(value: object, **keys: Any) -> str:  # noqa: ANN401  # of `policy`
    service = make_service(policy("p", ANY, **{"similarity": "turns", **keys}))
    send(service, value)
    return next((strength for *_, strength in service.metrics.detections), "")


def find_reason(value: object, **keys: Any) -> str:  # noqa: ANN401  # of `policy`
    """Why a detector does not count a request; empty if it does."""
    service = make_service(policy("p", ANY, **{"similarity": "turns", **keys}))
    send(service, value)
    return next(iter(list_uncounted(service)), "")
