"""Random clients that try to pay less are charged for what their responses report.

A response may report its tokens, stream without usage, or report nonsense; the client may leave;
the entry in the access log may arrive once, twice, at the other replica, or never.
"""

from typing import Any, NamedTuple

from hypothesis import given, strategies as st

from extproc.metrics import Metrics
from extproc.store.memory import MemoryStore
from tests.support.budget_policies import REJECT, Clock, ask, chat, limited, refused, rule, tell
from tests.support.service import CHAT, headers_of, make_service, metadata_of

LARGE = 10**8
SENT = (0.1, 0.2)
ABSURD = 999_999_999
LEFT = "downstream_remote_reset"


class Sent(NamedTuple):
    """A request and its outcome.

    Attributes:
        named: it says who pays.
        size: characters of its prompt.
        most: the maximum of each answer; 0 for none.
        samples: number of answers.
        share: percent of the possible length of its answers.
        air: bytes around each token of a stream.
        outcome: see `_OUTCOMES`.
        entries: the replicas that get its entry.
        again: it is sent again, unchanged.
        path: what is put behind its path.
    """

    named: bool
    size: int
    most: int
    samples: int
    share: int
    air: int
    outcome: str
    entries: list[int]
    again: bool
    path: str

    @property
    def prompt(self) -> int:
        return -(-self.size // 4)

    @property
    def output(self) -> int:
        return (self.most or 1_000) * self.samples * self.share // 100

    @property
    def said(self) -> int:
        """The tokens that its responses report or show; 0 after an error or no response."""
        if self.outcome in ("error", "unsent", "left before"):
            return 0
        return self.prompt + self.output

    @property
    def entry(self) -> dict[str, Any]:
        told = {"input": self.prompt, "output": self.output}
        sizes = (self.size + 80, self.output * 4 + 100)
        streamed = {
            "sizes": (sizes[0], self.output * (4 + self.air)),
            "headers": {"content-type": "text/event-stream"},
        }
        entries: dict[str, dict[str, Any]] = {
            "told": {"told": told, "sizes": sizes, "took": SENT},
            "stream": {**streamed, "took": SENT},
            "document": {"sizes": sizes, "took": SENT},
            "left before": {"status": 0, "sizes": (sizes[0], 0), "took": SENT, LEFT: True},
            "left within": {**streamed, "took": SENT, LEFT: True},
            "left at the end": {"told": told, **streamed, "took": SENT, LEFT: True},
            "absurd": {"told": told | {"output": ABSURD}, "sizes": sizes, "took": SENT},
            "much cached": {"told": told | {"cached": ABSURD}, "sizes": sizes, "took": SENT},
            "error": {"status": 503, "sizes": (sizes[0], 20), "took": SENT},
            "unsent": {"status": 403, "sizes": (0, 20)},
        }
        return entries[self.outcome]


_OUTCOMES = [
    *(
        "told",
        "stream",
        "document",
        "left before",
        "left within",
        "left at the end",
        "absurd",
        "much cached",
    ),
    *("error", "unsent"),
]
REQUESTS = st.lists(
    st.builds(
        Sent,
        st.booleans(),
        st.integers(0, 4_000),
        st.sampled_from([0, 1, 50, 700, 3_000]),
        st.integers(1, 5),
        st.integers(0, 100),
        st.sampled_from([0, 1, 100, 300]),
        st.sampled_from(_OUTCOMES),
        st.sampled_from([[0], [1], [0, 1], [1, 1, 0], []]),
        st.booleans(),
        st.sampled_from(["", ";", ";:countTokens", ";x=/v1/messages/count_tokens"]),
    ),
    min_size=1,
    max_size=25,
)


class Replicas:
    """Two replicas on one store, with a daily budget per caller; unnamed callers share one."""

    def __init__(self, budget: int, **spec: Any) -> None:  # noqa: ANN401  # keys of a spec
        made = rule(
            "cost_based", budget=budget, cost_key="usage:tokens", period="1d", staged_actions=REJECT
        )
        store = MemoryStore(Metrics(), clock=Clock())
        self.replicas = [make_service(limited(made, **spec), store=store) for _ in range(2)]

    def send(self, sent: Sent, replica: int) -> bool:
        limit = {"max_tokens": sent.most} if sent.most else {}
        content = chat("x" * sent.size, stream=True, n=sent.samples, **limit)
        answer = ask(self.replicas[replica], "k" if sent.named else "", CHAT + sent.path, content)
        if answer.HasField("immediate_response"):
            return False
        for number in sent.entries:
            tell(self.replicas[number], answer, **sent.entry)
        return True

    def read_charge(self, key: str, budget: int) -> int:
        """What a caller has paid; the request that reads it is given back."""
        answer = ask(self.replicas[0], key, content=chat("", max_tokens=1))
        if refused(answer):
            return budget - int(headers_of(answer)["RateLimit-Remaining"])
        tell(self.replicas[0], answer, status=403, sizes=(0, 20))
        return budget - int(metadata_of(answer)["ratelimit_remaining"]) - 1


@given(REQUESTS)
def test_caller_pays_what_its_responses_report(sent: list[Sent]) -> None:
    made = Replicas(LARGE, missing_descriptor="share")
    said = {"": 0, "k": 0}
    for number, one in enumerate(sent):
        for _ in range(1 + one.again):
            assert made.send(one, number % 2)
            said["k" if one.named else ""] += one.said
        for caller, least in said.items():
            assert made.read_charge(caller, LARGE) >= least


@given(REQUESTS, st.sampled_from([500, 2_000, 10_000]))
def test_caller_exceeds_its_budget_by_one_request_at_most(sent: list[Sent], budget: int) -> None:
    made = Replicas(budget, uncountable="reject")
    said, largest = 0, 0
    for number, one in enumerate(sent):
        for _ in range(1 + one.again):
            passed = made.send(one, number % 2)
            assert one.named or not passed
            said += one.said if passed else 0
            largest = max(largest, one.said)

    assert said <= budget + largest
