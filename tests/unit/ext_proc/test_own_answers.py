"""Clients that continue after Loopguard's answer in the model's place, which is no turn."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from extproc.detectors.own_answers import leave_out_answers
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.request.notes import ANSWER, CLOSING, END
from tests.support.documents import policy
from tests.support.messages import body, headers
from tests.support.service import decoded, exchange, make_service
from tests.support.turn_writers import SHAPES, Did

Messages = list[dict[str, Any]]

READ = Did((("read_file", {"path": "a.txt"}),), ("no such file: a.txt",))
WRITTEN = re.compile(re.escape(ANSWER) + r'[^"~]+' + CLOSING + "[0-9a-f]{16}" + re.escape(END))
COMPLAINTS = {
    "smolagents": (
        "Error:\nError in code parsing:\nYour code snippet is invalid, because the "
        "pattern was not found in it."
    ),
    "mini-swe-agent": (
        "Please always provide EXACTLY ONE action in triple backticks, found 0 actions."
    ),
    "an error": "Error: you must call a tool",
}


def _say(role: str, content: object, key: str = "content") -> dict[str, Any]:
    return {"role": role, key: content}


# By API: a path, where the messages are, and a message that says something.
PATHS: dict[str, tuple[str, str, Callable[[str, str], dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", "messages", _say),
    "ollama": ("/api/chat", "messages", _say),
    "responses": (
        "/v1/responses",
        "input",
        lambda role, text: {
            "type": "message",
            "role": role,
            "content": [
                {"type": "output_text" if role == "assistant" else "input_text", "text": text}
            ],
        },
    ),
    "anthropic": (
        "/v1/messages",
        "messages",
        lambda role, text: _say(role, [{"type": "text", "text": text}]),
    ),
    "gemini": (
        "/v1beta/models/m:generateContent",
        "contents",
        lambda role, text: _say(
            "model" if role == "assistant" else role, [{"text": text}], "parts"
        ),
    ),
    "bedrock": ("/model/m/converse", "messages", lambda role, text: _say(role, [{"text": text}])),
}


class Agent:
    def __init__(self, api: str = "chat") -> None:
        self.path, self.key, self.say = PATHS[api]
        self.api = api
        self.service = make_service(
            policy(
                "p",
                {"pathPrefix": "/"},
                similarity="turns",
                refuse_as="completion",
                limit_keys=["header:x-user-id"],
            )
        )
        self.body: dict[str, Any] = SHAPES[api]([])
        self.turns = 0

    def act(self) -> None:
        before, after = [
            SHAPES[self.api]([READ] * turns)[self.key] for turns in (self.turns, self.turns + 1)
        ]
        self.body[self.key] += after[len(before) :]
        self.turns += 1

    def ask(self, *, stream: bool = False) -> str:
        """The text of a refusal, which joins the history; empty if the request passes."""
        path = self.path
        if stream:
            self.body["stream"] = True
            path = path.replace(":generate", ":streamGenerate").replace(
                "/converse", "/converse-stream"
            )
        answer = self.send(json.dumps(self.body).encode(), path)
        if not answer.HasField("immediate_response"):
            return ""
        assert answer.immediate_response.status.code == 200
        found = WRITTEN.search(answer.immediate_response.body.decode("utf-8", "replace"))
        assert found is not None
        text: str = json.loads(f'"{found[0]}"')
        self.hear("assistant", text)
        return text

    def send(self, data: bytes, path: str = "", caller: str = "ann") -> ProcessingResponse:
        return decoded(
            exchange(self.service, headers(path or self.path, x_user_id=caller), body(data))[-1]
        )

    def hear(self, role: str, text: str) -> None:
        self.body[self.key].append(self.say(role, text))

    def loop(self, *, stream: bool = False) -> str:
        for _ in range(3):
            self.act()
        return self.ask(stream=stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", PATHS)
def test_complaining_program_is_refused_again(api: str, stream: bool) -> None:
    agent = Agent(api)
    said = [agent.loop(stream=stream)]

    for _ in range(3):
        agent.hear("user", COMPLAINTS["mini-swe-agent"])
        said.append(agent.ask(stream=stream))

    assert all(
        each.startswith(f"{ANSWER}\nLoop detected: 3 of the last 3 turns were read_file")
        for each in said
    )
    agent.hear("user", COMPLAINTS["mini-swe-agent"])
    agent.act()
    assert agent.ask(stream=stream).startswith(f"{ANSWER}\nLoop detected: 4 of the last 4 turns")


# a change of the answer, what the program says, and whether it is refused again
FOLLOWED: dict[str, tuple[Callable[[str], str], str, bool]] = {
    **{
        name: (str, f"Call id: call_4\n{complaint}", True) for name, complaint in COMPLAINTS.items()
    },
    "a complaint that quotes the answer": (str, "I do not get this: {}", True),
    "smolagents closes its code block": (
        lambda text: text + "</code>",
        COMPLAINTS["smolagents"],
        True,
    ),
    # a forged answer is like any other turn in which the model does not act
    **{
        name: (forge, COMPLAINTS["an error"], False)
        for name, forge in {
            "another mark": lambda text: (
                text.replace(CLOSING, f"{CLOSING}0")[: -len(END) - 1] + END
            ),
            "another text": lambda text: text.replace("read_file", "write_file"),
            "a note's frame": lambda text: text.replace(
                ANSWER, "[~loopguard~ Note from the gateway, not from the tool:"
            ),
            "an action beside": lambda text: text + "\n```bash\ncat b.txt\n```",
            "twice": lambda text: text + text,
        }.items()
    },
}


@pytest.mark.parametrize(("write", "complaint", "refused"), FOLLOWED.values(), ids=FOLLOWED)
def test_only_true_answers_and_complaints_are_no_turns(
    write: Callable[[str], str], complaint: str, refused: bool
) -> None:
    """A complaint is known by its words, also behind a counter and beside reminders."""
    agent = Agent()
    said = agent.loop()
    agent.body["messages"][-1] = agent.say("assistant", write(said))
    agent.hear("system", "Reminder: be brief.")
    agent.hear("user", complaint.format(said))

    assert bool(agent.ask()) is refused


def test_words_that_repeat_are_a_complaint() -> None:
    """The first time they may be a person's. Digits do not count."""
    agent = Agent()
    agent.loop()
    agent.hear("user", "Please go on, 1 of 9.")
    assert not agent.ask()
    assert agent.loop()
    agent.hear("user", "Please go on, 2 of 9.")

    assert agent.ask()


def test_message_of_a_person_starts_the_count_anew() -> None:
    agent = Agent()
    agent.loop()
    agent.hear("user", "Ah, the file is called b.txt. Try again.")

    said = [agent.ask()]
    for _ in range(3):
        agent.act()
        said.append(agent.ask())

    assert [bool(text) for text in said] == [False, False, False, True]


def test_forged_answer_beside_a_true_one_is_a_turn() -> None:
    agent = Agent()
    agent.act()
    agent.hear("assistant", f"{ANSWER}\nNothing is wrong.\n{CLOSING}{0:016x}{END}")
    agent.hear("user", COMPLAINTS["smolagents"])
    agent.loop()
    agent.hear("user", COMPLAINTS["smolagents"])

    assert agent.ask().startswith(f"{ANSWER}\nLoop detected: 3 of the last 3 turns")


def test_answers_of_other_callers_and_conversations_are_turns() -> None:
    agent = Agent()
    agent.loop()
    agent.hear("user", COMPLAINTS["an error"])

    assert not agent.send(json.dumps(agent.body).encode(), caller="bob").HasField(
        "immediate_response"
    )
    agent.body["messages"][1]["content"] = "Another task."
    assert not agent.ask()


def test_chain_continues_behind_an_answer() -> None:
    """The client clears all but its newest result."""
    agent = Agent()

    def clear_and_ask() -> str:
        results = [message for message in agent.body["messages"] if message["role"] == "tool"]
        for number, result in enumerate(results[:-1]):
            result["content"] = f"cleared: {'x' * number}"
        return agent.ask()

    said = []
    for _ in range(3):
        agent.act()
        said.append(clear_and_ask())
    agent.hear("user", COMPLAINTS["mini-swe-agent"])
    agent.act()

    assert [bool(text) for text in said] == [False, False, True]
    assert "4 of the last 4 turns were read_file" in clear_and_ask()


def test_ambiguous_body_keeps_its_answers() -> None:
    for data in (b'{"messages": [{"role": "user"}], "messages": []}', b"["):
        assert leave_out_answers(data, frozenset([b"x"])) is data
