"""`make precision`."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.bench.precision.__main__ import main
from tests.bench.precision.conversations import read_conversation
from tests.bench.precision.measure import make_share
from tests.bench.precision.others import RULES
from tests.bench.precision.page import fill_page
from tests.support import ROOT
from tests.support.documents import bundle, policy
from tests.support.engine import ANY
from tests.support.families import UNTELLABLE
from tests.support.labelled import FORMATS, make_set
from tests.support.turn_writers import Did

LOOP = {"loop": True, "begins": 3, "success": False, "kind": "stuck"}
HONEST = {"loop": False, "success": True, "kind": "work"}


def work(count: int, *, again: int = 0) -> list[Did]:
    turns = [
        Did((("read", {"path": f"f{n}"}),), (f"line {n}",), "", f"thought {n}", n)
        for n in range(1, count + 1)
    ]
    turns += [
        Did((("read", {"path": "x"}),), ("no such file",), "", f"again {n}", count + n)
        for n in range(1, again + 1)
    ]
    return turns


class Measured:
    def __init__(
        self,
        folder: Path,
        capsys: pytest.CaptureFixture[str],
        lines: Sequence[Any],
        *flags: str,
        packed: bool = False,
    ) -> None:
        data = b"".join(
            [
                line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
                for line in lines
            ]
        )
        name = "set.gz" if packed else "set"
        (folder / name).write_bytes(gzip.compress(data) if packed else data)
        self.code = main(["--json", *flags, str(folder / name)])
        printed = capsys.readouterr()
        self.error = printed.err.replace(f"{folder}/", "")
        self.document: dict[str, Any] = json.loads(printed.out) if printed.out else {}

    def find(self, detector: str = "turns", policy: str = "agents") -> dict[str, Any]:
        settings = self.document["settings"]
        return next(
            each for each in settings if (each["policy"], each["detector"]) == (policy, detector)
        )


@pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS)
def test_precision_reads_every_format(
    write: Callable[[Sequence[Did]], dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = Measured(
        tmp_path,
        capsys,
        [{"label": LOOP, **write(work(2, again=8))}, {"label": HONEST, **write(work(10))}],
    )

    assert (found.code, found.error, found.document["requests"]) == (0, "", 22)
    acted, refused = found.find()["acted_on"], found.find()["refused"]
    assert (acted["loops"]["found"], acted["others"]["found"], acted["turns"]) == (
        1,
        0,
        {"median": 3, "longest": 3},
    )
    assert (refused["loops"]["found"], refused["others"]["found"], refused["turns"]) == (
        1,
        0,
        {"median": 7, "longest": 7},
    )
    assert [each["request"] for each in (*acted["found"], *refused["found"])] == [6, 10]
    assert (refused["loops"]["of"], refused["others"]["of"], refused["successes"]["of"]) == (
        1,
        1,
        1,
    )


def test_precision_counts_bytes_after_first_refusal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"label": LOOP, **FORMATS["chat"](work(2, again=8))}
    bodies = read_conversation(json.dumps(line).encode(), Path()).bodies
    sent = {"label": LOOP, "requests": [json.loads(body) for body in bodies]}
    sizes = [len(json.dumps(body)) for body in sent["requests"]]

    found = Measured(tmp_path, capsys, [sent, {"label": HONEST, **FORMATS["chat"](work(10))}])

    refused = found.find()["refused"]
    assert refused["bytes_of_loops"] == sum(sizes[9:]) / sum(sizes)
    assert refused["bytes_of_all"] == sum(sizes[9:]) / found.document["bytes"]


def test_precision_lists_wrong_and_early_actions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stuck = FORMATS["chat"](work(2, again=9))
    late = FORMATS["chat"]([*work(0, again=8), *[turn._replace(number=0) for turn in work(4)]])
    lines = [
        {"id": "honest", "label": HONEST, **stuck},
        {"id": "late", "label": {"loop": True, "begins": 9}, **late},
        {"id": "missed", "label": {"loop": True}, **FORMATS["chat"](work(4))},
        {"label": {"loop": None}, **stuck},
    ]

    found = Measured(tmp_path, capsys, lines, packed=True)

    refused = found.find()["refused"]
    assert {each["id"]: each.get("request") for each in refused["wrong"]} == {
        "honest": 10,
        "late": 8,
    }
    assert [each["id"] for each in refused["missed"]] == ["late", "missed"]
    others = {rule: found.find(rule, "others")["refused"]["wrong"][0]["request"] for rule in RULES}
    assert others == {"OpenHands": 7, "gemini-cli": 9, "OpenRouter": 9, "equal calls": 10}
    assert (refused["early"], refused["unclear"], refused["successes"]["found"]) == (1, 1, 1)
    assert refused["wrong"][0]["place"] == f"{tmp_path}/set.gz:1"


@pytest.mark.parametrize("key", ["header:x-team", "jwt:sub", "query:user", "credential"])
def test_precision_gives_each_conversation_a_caller(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = bundle(
        policy("p", ANY, limit_keys=[key], similarity="tail", threshold_identical_requests=2)
    )
    (tmp_path / "p.json").write_text(json.dumps(document))
    line = {"label": LOOP, **FORMATS["chat"](work(2, again=6))}
    body = read_conversation(json.dumps(line).encode(), Path()).bodies[1]
    sent = [
        {"label": {"loop": True}, "requests": [json.loads(body)] * times} for times in (1, 1, 2)
    ]

    def count(*flags: str) -> tuple[int, int]:
        share = Measured(tmp_path, capsys, sent, "--policy", str(tmp_path / "p.json"), *flags).find(
            "default", "p"
        )
        return share["acted_on"]["loops"]["found"], share["acted_on"]["loops"]["of"]

    assert (count(), count("--seconds", "3600")) == ((1, 3), (0, 3))


def test_precision_reads_named_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trajectory.json").write_text(
        json.dumps(FORMATS["atif"](work(2, again=8)), indent=2)
    )
    (tmp_path / "messages.json").write_text(json.dumps(FORMATS["chat"](work(9))["messages"]))
    lines = [
        {"label": LOOP, "file": "run/trajectory.json"},
        {"label": HONEST, "file": "messages.json"},
    ]

    found = Measured(tmp_path, capsys, lines)

    assert (found.code, found.document["requests"]) == (0, 21)
    assert found.find()["refused"]["loops"]["found"] == 1


CHAT = FORMATS["chat"](work(2))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{", 'a line must be a JSON object, such as {"label": '),
        (b"[1]\n", 'a line must be a JSON object, such as {"label": '),
        (CHAT, 'label is missing: it must be an object such as {"loop": true'),
        ({"label": 1, **CHAT}, 'label must be an object such as {"loop": true'),
        ({"label": {}, **CHAT}, "label.loop must be true, false, or null where it is unclear"),
        (
            {"label": {"loop": 1}, **CHAT},
            "label.loop must be true, false, or null where it is unclear",
        ),
        (
            {"label": {"loop": True, "start": 1}, **CHAT},
            "label.start is unknown: a label has loop, begins, success and kind",
        ),
        (
            {"label": {"loop": True, "begins": 0}, **CHAT},
            "label.begins must be the number of the loop's first answer",
        ),
        (
            {"label": {"loop": False, "begins": 2}, **CHAT},
            "label.begins must be the number of the loop's first answer",
        ),
        (
            {"label": {"loop": True, "begins": 4}, **CHAT},
            "label.begins must be at most 3, the number of requests, not 4",
        ),
        (
            {"label": {"loop": True, "success": "no"}, **CHAT},
            "label.success must be true, false, or null",
        ),
        (
            {"label": {"loop": True, "kind": 1}, **CHAT},
            'label.kind must be a text, such as "polling"',
        ),
        (
            {"label": HONEST},
            (
                "there is no conversation: give messages as an API or ATIF has them, requests, or "
                "a "
                "file"
            ),
        ),
        ({"label": HONEST, "messages": "hi"}, "there is no conversation: give messages"),
        ({"label": HONEST, "messages": []}, "there is no conversation: give messages"),
        ({"label": HONEST, "prompt": "hi"}, "prompt must be a list of messages"),
        (
            {"label": HONEST, "request": {"contents": CHAT["messages"]}},
            "request.contents cannot be taken apart: give the",
        ),
        (
            {"label": HONEST, "steps": [{"source": "x"}]},
            "the source of a step must be one of user, system, agent",
        ),
        (
            {"label": HONEST, "steps": [{}]},
            "steps must be a list of ATIF's steps, each with a source",
        ),
        ({"label": HONEST, "requests": []}, "requests must be a list of JSON objects"),
        ({"label": HONEST, "requests": 1}, "requests must be a list of bodies"),
        (
            {"label": HONEST, "file": "none.json"},
            "file none.json cannot be read: No such file or directory",
        ),
        ({"label": HONEST, "path": 1, **CHAT}, "path must be a path such as /v1/chat"),
        ({"label": HONEST, "headers": [], **CHAT}, "headers must be an object of texts"),
    ],
)
def test_precision_reports_invalid_lines(
    line: Any,  # noqa: ANN401  # JSON
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = Measured(tmp_path, capsys, [{"label": HONEST, **CHAT}, line])

    assert (found.code, found.document["conversations"]) == (1, 1)
    assert found.error.startswith(f"error: set:2: {told}")


@pytest.mark.parametrize(
    ("found", "of", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (217, 248, 0.8284, 0.9102),
        (0, 0, 0.0, 1.0),
    ],
)
def test_precision_uses_wilson_intervals(found: int, of: int, low: float, high: float) -> None:
    share = make_share(found, of)

    assert [share.low, share.high] == pytest.approx([low, high], abs=1e-3)


@pytest.mark.deep
def test_page_has_figures_of_generated_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "detectors.md").read_text()
    (tmp_path / "set").write_text("\n".join(map(json.dumps, make_set())))
    (tmp_path / "page").write_text(page)

    code = main(["--page", str(tmp_path / "page"), str(tmp_path / "set")])

    assert (code, capsys.readouterr().err) == (0, "")
    assert (tmp_path / "page").read_text() == page, "run make precision"
    (row,) = [line for line in page.splitlines() if line.startswith("|no loop, but refused|")]
    assert row.strip("|").split("|")[-1].split("; ") == sorted(UNTELLABLE)


def test_page_needs_place_for_figures() -> None:
    with pytest.raises(ValueError, match="the page has no lines"):
        fill_page("# Detectors", [])
