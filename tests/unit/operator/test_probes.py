"""Requests of `check-envoy --probe`, as a running Loopguard notes them."""

from extproc.operator.probes import Probes
from tests.support.engine import get

PROBE, OTHER = "0" * 32, "1" * 32


def send(probes: Probes, mark: str) -> None:
    request = get("/", x_loopguard_probe=mark)
    probes.note_match(request, ["p"])


def test_only_followed_probes_are_noted() -> None:
    probes = Probes()
    send(probes, f"{PROBE}.0")
    before = probes.follow(PROBE)
    for mark in (f"{PROBE}.1", f"{OTHER}.1", "", PROBE[:-1], f"{PROBE}.{'9' * 100}"):
        send(probes, mark)

    assert before == {}
    assert probes.follow(PROBE) == {f"{PROBE}.1": {"matched": ["p"], "counted": [], "left_out": {}}}


def test_noted_marks_and_probes_are_bounded() -> None:
    probes = Probes()
    probes.follow(PROBE)
    for number in range(6_000):
        send(probes, f"{PROBE}.{number}")
    marks = len(probes.follow(PROBE))
    for number in range(100):
        probes.follow(f"{number:032x}")

    for number in range(100):
        send(probes, f"{number:032x}.0")
    followed = [number for number in reversed(range(100)) if probes.follow(f"{number:032x}")]

    assert (marks, followed) == (5_000, [99, 98, 97, 96, 95, 94, 93, 92])
