"""Scratchpads: one text with all steps of an agent, such as LangChain's classic agents send.

    Question: ...
    Thought: I have to look
    Action: search
    Action Input: lamps
    Observation: nothing found
    Thought:

Each step is read as two messages: the assistant's, with thought and action, and the observation.
The description of the format and its examples come before the last question, and are not steps.

`_FORMS` has the forms, each with the programs whose own templates write it.
"""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple

from extproc.apis.contents import list_texts
from extproc.apis.conversation import ASSISTANT, USER, Message
from extproc.apis.messages import TEXT
from extproc.detectors.actions import names_action
from extproc.looks import look_for
from extproc.request.document import Json

IN_SYSTEM: Final = ": Executed `"
"""The sign of the form that AutoGPT (classic/forge) writes into a system message."""

_LEAST_STEPS: Final = 2
_FENCE: Final = "```"
_LOOKED_AT: Final = 131_072
"""Number of characters to search, from the end of a text."""

_THINKS: Final = "thinks"
_ACTS: Final = "acts"
_REMARKS: Final = "remarks"
_OBSERVES: Final = "observes"
_ENDS: Final = "ends"
_ASKS: Final = "asks"
_BEGINS: Final = "begins"
"""Groups of a form's marks: a thought, an action, a thought behind its action, an observation, the
end of one, a new question (within an observation, it is part of it), and the end of all examples.
A mark without a group is left out."""


class Form(NamedTuple):
    """How programs write steps.

    Attributes:
        sign: every text of this form contains it.
        marks: what begins each part of a step.
        plain: the step's own words tell its action, so that marks are no part of it.
    """

    sign: str
    marks: re.Pattern[str]
    plain: bool = True


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.VERBOSE | re.MULTILINE | re.IGNORECASE)


_FORMS: Final = (
    # ReAct: langchain-classic 1.0.8 (mrkl, chat, conversational, structured chat)
    Form(
        "bservation",
        _compile(r"""
            ^[ \t>*\#-]{0,16}+(?=[taofqbnsTAOFQBNS])(?:
                (?P<acts>action)(?:\ ?[0-9]{1,3})?[*]{0,2}:
              | (?P<thinks>thought(?:\ ?[0-9]{1,3})?[*]{0,2}:|step\ [0-9]{1,3}:?[*]{0,2}[ \t]*$)
              | (?P<observes>observation)(?:\ ?[0-9]{1,3})?[*]{0,2}:
              | (?:(?P<begins>begin!)|(?P<asks>question|final\ answer|new\ input))[*]{0,2}
                (?::|[ \t]*$)
            )
        """),
        plain=False,
    ),
    # DSPy 3.4.1: ReAct and Avatar, with its adapters for chats, JSON and XML
    *[
        Form(
            sign,
            _compile(r"""
                ^(?:\[\[\ \#\#\ |<)(?:
                    (?P<thinks>thought)_[0-9]+
                  | (?P<acts>tool_name|action)_[0-9]+
                  | tool_args_[0-9]+
                  | (?P<observes>observation|result)_[0-9]+
                )(?:\ \#\#\ \]\]|>)
              | ^(?P<ends>\[\[\ \#\#\ \w+\ \#\#\ \]\]$|</trajectory>
                |Respond\ with\ (?:the\ corresp|a\ JSON))
              | ^</\w+_[0-9]+>
            """),
        )
        for sign in ("## observation_", "<observation_", "## result_", "<result_")
    ],
    # DSPy 3.4.1: RLM
    Form(
        "=== Step ",
        _compile(r"""
            ^===\ Step\ [0-9]+\ ===\n(?P<thinks>)
          | ^Code:\n(?P<acts>)(?=```)
          | ^Output\ \([0-9,]+\ chars\):\n(?P<observes>)
          | ^(?P<ends>\[\[\ \#\#\ \w+\ \#\#\ \]\]$|</repl_history>|Respond\ with\ the\ corresp)
        """),
    ),
    # langchain-classic 1.0.8: XML agent
    Form(
        "</tool_input>",
        _compile(r"""
            (?P<begins>^Begin!)
          | (?P<acts><tool>)
          | </tool>\s*<tool_input>
          | </tool_input>
          | (?P<observes><observation>)
          | (?P<ends></observation>)
        """),
    ),
    Form(
        IN_SYSTEM,
        _compile(r"""
            ^(?:\*|\#\#\#)\ Step\ [0-9]+:\ Executed\ `(?P<acts>)
          | ^[ \t]*-\ \*\*(?P<remarks>Reasoning):\*\*
          | ^[ \t]*-\ \*\*(?P<observes>Status):\*\*\ `(?:success`\n[ ]*-\ \*\*Output:\*\*)?
          | `\n[ ]*-\ \*\*Reason(?=:)
          | ^(?P<ends>(?:\*|\#\#\#)\ Step\ [0-9]+:)
        """),
    ),
    # langchain-experimental 0.4.2: plan and execute
    Form(
        "StepResponse(",
        _compile(r"""
            \(Step\(value=["'](?P<acts>)
          | ["']\),\ StepResponse\(response=["'](?P<observes>)
          | (?P<ends>["']\)\)(?:,\ (?=\(Step)|\]))
        """),
    ),
    # langchain-classic 1.0.8: self-ask with search
    Form(
        "ntermediate answer:",
        _compile(r"""
            ^(?:
                (?P<acts>follow\ up):
              | (?P<observes>intermediate\ answer):
              | (?P<asks>question|so\ the\ final\ answer\ is):
            )
        """),
    ),
    # Plans of many programs: `Step 3: look at the page`, `Result: ...`
    Form(
        "tep ",
        _compile(r"""
            ^[ \t>*\#-]{0,16}+(?:
                step\ (?P<acts>)[0-9]{1,3}[*]{0,2}[:.)][*]{0,2}
              | (?:action\ )?(?P<observes>result|output|outcome|response)(?:\ [0-9]{1,3})?[*]{0,2}:
            )
        """),
    ),
)

_TASKS_DONE: Final = "previously completed tasks:"
_NEXT_TASK: Final = "Your task:"
"""BabyAGI (langchain-experimental 0.4.2) lists the names of tasks between these."""

_IN_JSON: Final = ('"observation"', '"tool_output"', '"tool_result"')
"""Keys of observations in steps that are JSON objects, in a list or one after the other."""

_OBSERVED: Final = frozenset({key.strip('"') for key in _IN_JSON})
_TRIES: Final = 8
"""Number of false starts after which the search for JSON stops."""

_may_hold_steps: Final = look_for(
    r"""
      bservation|[\#<]\ ?result_|tep\ |:\ Executed\ `|</tool_input>|StepResponse\(
    | ntermediate\ answer:|completed\ tasks:|"tool_(?:output|result)"
    """
)
"""Whether a text contains the sign of any form. One search costs less than one for each."""

_scan_json: Final = json.JSONDecoder().raw_decode

Step = tuple[str, str]
"""What the assistant said, and what it observed."""


def unfold(message: Message, sign: str = "") -> list[Message]:
    """The messages of a scratchpad, newest first; the message itself if it is not one.

    `sign`: only the form with this sign is looked for.
    """
    parts = message.read_parts()
    if not parts or any(part.kind != TEXT for part in parts):
        return [message]
    text = "\n".join(list_texts(parts))
    before, steps = read_steps(text) if not sign or sign in text else (text, [])
    if not steps:
        return [message]
    said = [(message.speaker, before)]
    for action, observation in steps:
        said += [(ASSISTANT, action), (USER, observation)]
    return message.divide(said)[::-1]


def read_steps(text: str) -> tuple[str, list[Step]]:
    """The text before the first step, and the steps; none if the text is not a scratchpad."""
    if not _may_hold_steps(text):
        return text, []
    for form in _FORMS:
        if form.sign in text:
            start, steps = _find_steps(text, form)
            if len(steps) >= _LEAST_STEPS:
                return text[:start], steps
    before, listed, tasks = text.partition(_TASKS_DONE)
    done = tasks.partition(_NEXT_TASK)[0].strip(" .\n").split("\n") if listed else []
    if len(done) >= _LEAST_STEPS:
        return before, [(f"Action: {task}", "") for task in done]
    if any(key in text for key in _IN_JSON):
        return _read_json(text)
    return text, []


class _Span:
    """Where the parts of a step are; -1 for parts that have not been found.

    Attributes:
        begins: where the step begins.
        acts: where its action begins, after the mark.
        acted: where its action ends.
        observes: where its observation begins, after the mark.
        ends: where its observation ends.
    """

    def __init__(self, begins: int) -> None:
        self.begins = begins
        self.acts = -1
        self.acted = -1
        self.observes = -1
        self.ends = -1

    def take(self, mark: re.Match[str]) -> bool:
        """Take the next mark; whether it begins the observation."""
        kind = mark.lastgroup
        if kind == _ACTS:
            self.acts = mark.end()
        elif kind == _REMARKS:
            self.acted = mark.start()
        elif kind == _OBSERVES and self.acts >= 0:
            self.acted = mark.start() if self.acted < 0 else self.acted
            self.observes = mark.end()
        return self.observes >= 0


def _find_steps(text: str, form: Form) -> tuple[int, list[Step]]:
    """Where the first step begins, and the steps."""
    spans: list[_Span] = []
    step: _Span | None = None
    observing = False
    for mark in form.marks.finditer(text, max(0, len(text) - _LOOKED_AT)):
        kind = mark.lastgroup
        if kind == _BEGINS or (kind == _ASKS and not observing):
            spans, step, observing = [], None, False
        elif observing and kind in {_THINKS, _ACTS, _ENDS}:
            spans[-1].ends = mark.start()
            step, observing = None, False
        if step is None and kind in {_THINKS, _ACTS}:
            step = _Span(mark.start())
        if step is not None and not observing and step.take(mark):
            spans.append(step)
            observing = True
    if not spans or text.count(_FENCE, 0, spans[0].begins) % 2:  # in an open code block: quoted
        return 0, []
    if observing:
        spans[-1].ends = _find_end(text, spans)
    return spans[0].begins, [_write(text, span, form) for span in spans]


def _find_end(text: str, spans: list[_Span]) -> int:
    """Where the newest result ends: at instructions if it is the last one of an equal action."""
    newest = spans[-1]
    action = text[newest.acts : newest.acted]
    for span in spans[-2::-1]:
        if text[span.acts : span.acted] == action:
            last = text[span.observes : span.ends].rstrip()
            end = newest.observes + len(last)
            same = text.startswith(last, newest.observes) and text.startswith("\n\n", end)
            return end if same else len(text)
    return len(text)


def _write(text: str, span: _Span, form: Form) -> Step:
    said, seen = text[span.begins : span.acted], text[span.observes : span.ends]
    if form.plain:
        said = "<thought>" + form.marks.sub(_write_mark, said).rstrip("` \n")
        seen = form.marks.sub(_leave_mark, seen)
    return said.strip(), seen.strip()


def _write_mark(mark: re.Match[str]) -> str:
    return "</thought>\nAction: " if mark.lastgroup == _ACTS else "\n"


def _leave_mark(mark: re.Match[str]) -> str:
    return mark[0] if mark.lastgroup else ""


def _read_json(text: str) -> tuple[str, list[Step]]:
    """Steps that are JSON objects, in a list or one after the other."""
    steps: list[Step] = []
    first, tries = len(text), _TRIES
    place = text.find("{", max(0, len(text) - _LOOKED_AT))
    while place >= 0 and tries:
        end = place + 1
        try:
            value, end = _scan_json(text, place)
        except json.JSONDecodeError as error:
            tries, end = tries - 1, max(end, error.pos)
        except (ValueError, RecursionError):
            break
        else:
            found = [step for each in _list_objects(value) for step in _read_object(each)]
            first = min(first, place) if found else first
            steps += found
        place = text.find("{", end)
    quoted = text.count(_FENCE, 0, first) % 2
    return (text, []) if quoted or len(steps) < _LEAST_STEPS else (text[:first], steps)


def _list_objects(value: dict[str, Json]) -> list[Json]:
    """The object, and those in its lists."""
    return [value, *[each for item in value.values() if isinstance(item, list) for each in item]]


def _read_object(value: Json) -> list[Step]:
    """The step in an object, if any."""
    if not isinstance(value, dict) or _OBSERVED.isdisjoint(value) or not names_action(value):
        return []
    acts = {key: item for key, item in value.items() if key not in _OBSERVED}
    seen = [item for key, item in value.items() if key in _OBSERVED]
    told = seen[0] if isinstance(seen[0], str) else json.dumps(seen[0])
    return [(json.dumps(acts), str(told))]
