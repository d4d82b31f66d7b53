"""A made-up API that shares no name with any other."""
# interpreted: msgspec makes its Structs of annotations, which compiled classes do not keep

from typing import Any

from msgspec import Raw, Struct, json

from extproc.apis.api import (
    Api,
    Completion,
    Endpoint,
    Question,
    Refusal,
    ToolList,
    ToolWords,
    frame_json,
)
from extproc.apis.contents import read_object
from extproc.apis.conversation import ASSISTANT, TOOL, USER, Shape
from extproc.apis.messages import CALL, RESULT, TEXT, Part
from extproc.apis.places import Place
from extproc.apis.usage import find_behind
from extproc.decision import Framed
from extproc.request.document import ABSENT
from extproc.request.patch import Patch, Value

_SPEAKERS = {"machine": ASSISTANT, "gadget": TOOL}


class Line(Struct, gc=False):
    by: str = ""
    says: Raw = ABSENT
    pushes: Raw = ABSENT


class Dialogue(Struct, gc=False):
    dialogue: list[Line]


def _name_speaker(line: Line) -> str:
    return _SPEAKERS.get(line.by, USER)


def _read(line: Line) -> list[Part]:
    if line.pushes is not ABSENT:
        button = read_object(line.pushes)
        return [Part(CALL, button["how"], button["button"])]
    return [Part(RESULT if line.by == "gadget" else TEXT, json.decode(line.says))]


def _locate(patch: Patch, line: Line, whole: Value) -> list[Place]:
    return [Place(patch.open_fields(whole)["says"], result=line.by == "gadget")]


def _write_error(refusal: Refusal, question: Question) -> Framed:
    return frame_json(refusal.status, {"oops": refusal.message, "to": question.read("reply_to")})


def _complete(completion: Completion, _: Question) -> Framed:
    return frame_json(200, {"machine": completion.text, "by_engine": completion.model})


API = Api(
    paths={r"/talk\Z": Endpoint(_write_error, _complete)},
    asked=("reply_to",),
    shapes=(
        Shape(
            ("dialogue",),
            Dialogue,
            Line,
            _name_speaker,
            _read,
            lambda line: line.says,
            locate=_locate,
        ),
    ),
    tool_lists=(ToolList("dialogue", "buttons", "may_push", none=b'"nothing"'),),
    tool_words=ToolWords(wrappers=frozenset({"labelled"})),
    models={"/machines/": lambda path: find_behind(path, "/machines/")},
    counts={"input": ("bill.heard",), "output": ("bill.spoken",)},
    events=("bill",),
    answered_by=("by_engine",),
    credentials=("header:x-acme-key",),
)


def write_dialogue(turns: int) -> dict[str, Any]:
    """A body in which the machine has pushed one button this many times, with the same result."""
    turn = [
        {"by": "machine", "pushes": {"button": "ring", "how": {"long": 1}}},
        {"by": "gadget", "says": "nobody is in"},
    ]
    buttons = [{"labelled": {"name": name}} for name in ("ring", "knock")]
    return {
        "dialogue": [{"by": "you", "says": "Get in."}, *turn * turns],
        "buttons": buttons,
        "may_push": "any",
    }
