"""A night through the real Envoy: agents loop, a client polls, a tool is down, others work."""

import json
from dataclasses import dataclass, field
from typing import Any

from tests.support.documents import bundle, policy
from tests.support.harness import Stack
from tests.support.turn_writers import Did, as_chat

CHAT, RUNS = "/v1/chat/completions", "/agents/v1/chat/completions"
USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
STEERED: dict[str, Any] = {
    "similarity": "turns",
    "action": "steer",
    "escalate": {"reject": 8},
    **USER,
}
POLICIES = bundle(
    policy("hooks", {"pathPrefix": "/hook"}, action="warn", threshold_identical_requests=5, **USER),
    policy(
        "polls",
        {"pathPrefix": "/jobs"},
        threshold_identical_requests=3,
        cooldown_seconds=600,
        **USER,
    ),
    policy("chat", {"pathExact": CHAT}, **STEERED),
    policy(
        "runs",
        {"pathExact": RUNS},
        session={"keys": ["header:x-session-id"]},
        session_limits={
            "max_steps": 200,
            "max_cost_per_session": 20.0,
            "prices": {"*": {"input": 2.5, "output": 10}},
        },
        **STEERED,
    ),
    policy(
        "chat-strict",
        {"pathExact": CHAT},
        mode="shadow",
        canary_of="chat",
        similarity="turns",
        **USER,
    ),
)

WRONG = (
    "error: the query must not be empty; give at least one keyword, such as a product or a customer"
)
DOWN = (
    "error: connection refused by the customer database at 10.0.0.9, which has been down for a "
    "while"
)


@dataclass
class Scene:
    """Callers' names end with `who`, `tool` is down, and `context` precedes every task."""

    made: Stack
    who: str
    tool: str
    context: str = field(default="", kw_only=True)

    def send(self, path: str, user: str, body: bytes = b"{}", **headers: str) -> int:
        named = {f"x-{name.replace('_', '-')}": value for name, value in headers.items()}
        given = {"x-user-id": f"{user}-{self.who}", "content-type": "application/json", **named}
        return self.made.send(path, method="POST", body=body, headers=given).status

    def storm(self) -> int:
        return self.send("/hook/billing", "storm", b'{"invoice": 7}')

    def chat(self, turns: int) -> int:
        return self.send(
            CHAT, "stuck", self.write(f"Find {self.who} a hotel", "book_hotel", WRONG, turns)
        )

    def run(self, turns: int) -> int:
        body = self.write(f"Search for {self.who}", "search_the_web", WRONG, turns)
        return self.send(RUNS, "spender", body, session_id=f"session-{self.who}")

    def poll(self) -> int:
        return self.send("/jobs/42", "poller")

    def work(self, steps: int = 3) -> set[int]:
        return {
            self.send(
                path,
                f"healthy-{number}",
                json.dumps({"messages": [{"role": "user", "content": f"{step}"}]}).encode(),
            )
            for step in range(steps)
            for number in range(2)
            for path in (CHAT, RUNS, "/hook/fine", "/jobs/7")
            if path in (CHAT, RUNS) or not step
        }

    def break_tool(self, rounds: int = 3) -> set[int]:
        """An outage: six agents of three callers get only errors, and continue at both replicas."""
        statuses = set()
        for more in range(rounds):
            for task in ("invoice", "lead"):
                for caller in ("ann", "bob", "cid"):
                    turns = [
                        Did(((self.tool, {"q": task}),), (DOWN,), "", f"{task}: try {n}", n)
                        for n in range(1, 9 + more)
                    ]
                    statuses.add(self.send(CHAT, caller, self._dump(as_chat(turns))))
            self.send("/hook/fine", "healthy-0")
        return statuses

    def begin(self) -> None:
        assert [self.storm() for _ in range(9)] == [200] * 9
        assert [self.chat(turns) for turns in range(1, 7)] == [200] * 6
        assert [self.run(turns) for turns in range(1, 7)] == [200] * 6
        assert [self.poll() for _ in range(4)] == [200, 200, 429, 429]
        assert 200 in self.break_tool()  # they wait, once it is known that it is not their fault
        assert self.work() == {200}

    def write(self, task: str, tool: str, result: str, turns: int) -> bytes:
        """A conversation in which an agent calls a tool with the same argument and new thoughts."""
        did = [
            Did(((tool, {"q": ""}),), (result,), "", f"{task}: attempt {number}", number)
            for number in range(1, turns + 1)
        ]
        document = as_chat(did)
        document["messages"][1]["content"] = task
        return self._dump({**document, "model": "gpt-4o"})

    def _dump(self, document: dict[str, Any]) -> bytes:
        document["messages"][0]["content"] += self.context
        return json.dumps(document).encode()
