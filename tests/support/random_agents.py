"""Random agents: all APIs, loops, progress, condensed histories, people, retries, parallel runs."""

from random import Random
from typing import Any

from tests.support.turn_writers import SHAPES, STYLES, Did

_TOOLS = ["bash", "read_file", "write_file", "think", "get_weather", "mcp__x__list"]
_RESULTS = [
    "ok",
    "",
    "error: no such file",
    "x" * 230,
    "not found: 404",
    ("503 service unavailable, try later"),
    "3 failed",
    "4 failed",
    "Error at 12:01:{second:02d} line {number}",
    "done in {number} ms",
    ('{{"error": "bad {number}"}}'),
    "Traceback (most recent call last): boom {number}",
]
_SAID = [
    "go on",
    "try again please",
    "now look at file {number}",
    "You must answer in JSON. attempt {number}",
]
_ANSWERS = ["I am done.", "I cannot do that", "ok", "thinking about it {number}"]


class Agent:
    def __init__(self, random: Random, name: str) -> None:
        self._random = random
        self._name = name
        self._turns: list[Did] = []
        self._done: list[Did] = []
        self.shape = random.choice(list(SHAPES))
        self._window = random.choice([0, 0, 0, 3, 5])
        self._writes_texts = random.random() < 0.25
        self._tools = random.choice([None, [{"type": "function", "function": {"name": "bash"}}]])
        self._marks_cache = random.random() < 0.2
        self._is_named = random.random() < 0.2
        self._is_odd = random.random() < 0.15
        self.sent = {"x_user_id": random.choice(["ann", "bob"])}
        if random.random() < 0.3:
            self.sent |= {"x_run": f"run {name}", "x_session_id": f"run {name}"}

    def _fill(self, text: str) -> str:
        return text.format(second=self._random.randrange(60), number=self._random.randrange(9))

    def _do(self, number: int) -> Did:
        random = self._random
        if self._done and random.random() < 0.6:
            again = random.choice(self._done[-3:])
            return again._replace(
                number=number, thought=again.thought if self._writes_texts else f"thought {number}"
            )
        user = self._fill(random.choice(_SAID)) if random.random() < 0.2 else ""
        thought = f"thought {random.randrange(50)}" if random.random() < 0.7 else ""
        if self._writes_texts or random.random() < 0.1:
            done = Did((("ls", {"a": random.randrange(2)}),), (), "", thought)
            style = random.choice(list(STYLES.values()))
            text = style(done) if random.random() < 0.6 else self._fill(random.choice(_ANSWERS))
            return Did(
                (), (), user or self._fill(random.choice(_RESULTS)) or "nothing", text, number
            )
        calls = [self._call() for _ in range(random.choice([1, 1, 1, 2, 3]))]
        results = (
            [self._fill(random.choice(_RESULTS)) for _ in calls] if random.random() < 0.9 else []
        )
        return Did(tuple(calls), tuple(results), user, thought, number)

    def _call(self) -> tuple[str, dict[str, Any]]:
        random = self._random
        tool = random.choice(_TOOLS[: random.choice([1, 2, 6])])
        if random.random() < 0.8:
            return tool, {"cmd": f"ls {random.randrange(2)}"}
        return tool, {"cmd": "x" * 70, "why": str(random.randrange(3))}

    def step(self) -> None:
        """Do something; sometimes the history loses turns or results."""
        done = self._do(len(self._done) + 1)
        self._done.append(done)
        self._turns.append(done)
        if self._random.random() < 0.02:
            self._turns = self._turns[-2:]
        if self._random.random() < 0.03:
            place = self._random.randrange(len(self._turns))
            cleared = self._turns[place]
            self._turns[place] = cleared._replace(
                results=tuple("[cleared]" for _ in cleared.results)
            )

    def write(self) -> dict[str, Any]:
        turns = self._turns[-self._window :]
        body = SHAPES[self.shape](turns)
        if self._tools is not None and self.shape in {"chat", "ollama", "responses"}:
            body["tools"] = self._tools
        newest = body["messages"][-1] if self.shape in {"anthropic", "chat"} else {}
        if (
            self._marks_cache
            and self.shape == "anthropic"
            and isinstance(newest.get("content"), list)
        ):
            newest["content"][-1]["cache_control"] = {"type": "ephemeral"}
        if self._is_odd and self.shape == "responses" and turns:
            body |= {"previous_response_id": "r1", "input": body["input"][-2:]}
        if self._is_odd and newest and self._random.random() < 0.3:
            body["messages"].append(
                {
                    "role": "assistant",
                    "content": self._random.choice(["{", "I am done.", "Let me see"]),
                }
            )
        if self._is_named:
            body["metadata"] = {"user_id": f"user_session_{self._name}"}
        return body
