"""`loopguard promote`: a policy acts on more callers, by a change of its file that changes nothing else."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.cli.commands.promote import _write
from extproc.errors import LoopguardError
from extproc.policy.splice import insert_behind, remove_member, replace_value
from tests.support.command import Run
from tests.support.documents import bundle, policy
from tests.support.harness import Loopguard, eventually, write_policies

SHADOW = b"""[
  {"id": "other", "spec": {"selector": {"pathPrefix": "/"}, "mode": "shadow", "limit_keys": ["jwt:a"],
   "loop_detection": {"enabled": true, "window_seconds": 60, "threshold_identical_requests": 3}}},
  {
    "id": "p",
    "description": "tabs,\\tquotes \\"mode\\": \\"shadow\\", 1e2 and \xe2\x80\xa8 stay as they are",
    "spec": {
      "selector": {"pathPrefix": "/"},
      "mode" : "shadow",
      "limit_keys": [ "header:x-user" ],
      "loop_detection": {"enabled": true, "window_seconds": 60, "threshold_identical_requests": 3}
    }
  }
]"""

DIFF = """--- {file}
+++ {file}
@@ -6,7 +6,8 @@
     "description": "tabs,\\tquotes \\"mode\\": \\"shadow\\", 1e2 and \u2028 stay as they are",
     "spec": {{
       "selector": {{"pathPrefix": "/"}},
-      "mode" : "shadow",
+      "mode" : "enforce",
+      "enforce_percent" : 25,
       "limit_keys": [ "header:x-user" ],
       "loop_detection": {{"enabled": true, "window_seconds": 60, "threshold_identical_requests": 3}}
     }}
"""
USER: dict[str, Any] = {"limit_keys": ["header:x-user"]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A policy file that was formatted by hand, without a newline at its end."""
    made = tmp_path / "policies.json"
    made.write_bytes(SHADOW)
    return made


def promote(capsys: pytest.CaptureFixture[str], file: Path, percent: int | None, *more: str, name: str = "p") -> Run:
    """One run of the command."""
    share = [] if percent is None else ["--percent", str(percent)]
    return Run(capsys, "promote", str(file), "--policy", name, *share, *more)


def written(file: Path, *policies: object, **more: object) -> Path:
    """A bundle's file."""
    file.write_text(json.dumps(bundle(*policies, **more), indent=2))  # type: ignore[arg-type]
    return file


def test_the_change_is_shown_and_not_made(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    """Without --write there is a unified diff on stdout, and the file is what it was."""
    run = promote(capsys, file, 25)

    assert (run.code, run.out, run.err) == (0, DIFF.format(file=file), "")
    assert file.read_bytes() == SHADOW


def test_step_by_step_to_all_callers(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    """Each step changes what it has to and no other byte; the last one is not made twice."""
    steps = []
    for percent in (25, 50, None):
        assert promote(capsys, file, percent, "--write").code == 0
        steps.append(file.read_bytes())
    last = promote(capsys, file, 100, "--write")

    def expected(number: int) -> bytes:
        line = b'"mode" : "enforce",\n      "enforce_percent" : %d,' % number
        return line.join(SHADOW.rsplit(b'"mode" : "shadow",', 1))

    assert steps == [expected(25), expected(50), expected(100)]
    assert (last.code, last.out, last.err) == (0, "", "nothing to change: p already acts on all callers\n")
    assert file.read_bytes() == steps[-1]


def test_at_once_to_all_callers(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    """Without --percent a shadow policy acts on all callers, and is told so by its mode alone."""
    run = promote(capsys, file, None, "--write")

    assert run.err == "written: p acts on all callers\n"
    assert file.read_bytes() == b'"mode" : "enforce",'.join(SHADOW.rsplit(b'"mode" : "shadow",', 1))


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        ({"percent": 0}, 2, "--percent must be 1 to 100, not 0"),
        ({"percent": 101}, 2, "--percent must be 1 to 100, not 101"),
        ({"percent": 5, "name": "othr"}, 2, "the file has no policy 'othr'; did you mean 'other'?"),
        ({"percent": 5, "name": "x"}, 2, "the file has no policy 'x'"),
    ],
)
def test_what_cannot_be_asked_for(
    capsys: pytest.CaptureFixture[str], file: Path, arguments: dict[str, Any], code: int, complaint: str
) -> None:
    """An invalid share and an unknown policy are errors of the command line."""
    run = promote(capsys, file, arguments["percent"], "--write", name=arguments.get("name", "p"))

    assert (run.code, run.out, run.err) == (code, "", f"loopguard: {complaint}\n")
    assert file.read_bytes() == SHADOW


def test_a_directory_holds_many_files(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    """The file is to be named, because one change is made in one file."""
    run = promote(capsys, file.parent, 25)

    told = f"{file.parent} is a directory; give the file in it that has the policy"
    assert (run.code, run.err) == (2, f"loopguard: {told}\n")


def test_promoting_only_ever_adds(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    """A smaller share is refused, with what to do instead; the same share is nothing to do."""
    promote(capsys, file, 50, "--write")

    same, less = promote(capsys, file, 50), promote(capsys, file, 25, "--write")

    assert (same.code, same.err) == (0, "nothing to change: p already acts on 50 percent of its callers\n")
    told = "to lower it, change enforce_percent in the file, or set mode to shadow"
    assert (less.code, less.err) == (1, f"loopguard: p already acts on 50 percent of its callers, which is more; {told}\n")


def test_what_would_not_load_is_not_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The result is checked as a whole before anything is shown."""
    file = written(tmp_path / "p.json", policy("p", {"pathPrefix": "/"}, mode="shadow"))
    before = file.read_bytes()

    run = promote(capsys, file, 25, "--write")

    assert (run.code, run.out) == (1, "")
    assert run.err.startswith(
        f"{file}: /policies/0/spec/enforce_percent: enforce_percent chooses among callers, but no limit_keys"
    )
    assert file.read_bytes() == before


def test_a_file_that_does_not_load_is_not_touched(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Everything that is wrong in it is reported, as by validate."""
    file = written(tmp_path / "p.json", policy("p", {"pathPrefix": "x"}, mode="shadow", limit_keys=["y"]))

    run = promote(capsys, file, 25, "--write")

    assert run.code == 1
    assert [line.split(": ")[1] for line in run.err.splitlines()] == [
        "/policies/0/spec/selector/pathPrefix",
        "/policies/0/spec/limit_keys/0",
    ]


def test_mode_and_neighbours_stay(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    """The file keeps its mode, and nothing but the file is left in its directory."""
    file.chmod(0o640)

    promote(capsys, file, 25, "--write")

    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert list(file.parent.iterdir()) == [file]


def test_a_link_is_shown_and_not_replaced(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    """A ConfigMap that Kubernetes has mounted is made of links: a file in a link's place would cut it off from its source."""
    link = file.parent / "link.json"
    link.symlink_to(file)

    shown, run = promote(capsys, link, 25), promote(capsys, link, 25, "--write")

    assert (shown.code, shown.out) == (0, DIFF.format(file=link))
    assert run.code == 1
    assert run.err == (
        f"loopguard: {link} is a symbolic link, which is not replaced; change its target, "
        "or the ConfigMap if Kubernetes mounted it\n"
    )
    assert link.is_symlink()
    assert file.read_bytes() == SHADOW


def test_changes_by_another_program_are_kept(file: Path) -> None:
    """The file must be what it was when it was read, and no half-made file is left behind."""
    with pytest.raises(LoopguardError, match="was changed by another program; nothing was written"):
        _write(file, b"[]", b"{}")

    assert file.read_bytes() == SHADOW
    assert list(file.parent.iterdir()) == [file]


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """What the system says is told in one line."""
    with pytest.raises(LoopguardError, match=r"gone/p\.json cannot be written: No such file or directory; nothing was changed"):
        _write(tmp_path / "gone" / "p.json", b"", b"")


@pytest.mark.parametrize("percent", [25, 100])
def test_the_policy_that_it_is_a_canary_of_stays(capsys: pytest.CaptureFixture[str], tmp_path: Path, percent: int) -> None:
    """While the candidate acts on a share, it is still compared; once it acts on all callers, nothing is left to compare."""
    live, strict = policy("live", {"pathPrefix": "/"}, **USER), policy("strict", {"pathPrefix": "/"}, mode="shadow", **USER)
    strict["spec"]["canary_of"] = "live"
    file = written(tmp_path / "p.json", live, strict)

    run = promote(capsys, file, percent, "--write", name="strict")

    made = json.loads(file.read_bytes())["policies"]
    assert made[0] == live
    assert (made[1]["spec"]["mode"], made[1]["spec"].get("canary_of")) == ("enforce", "live" if percent < 100 else None)
    assert run.err.splitlines()[0] == (
        "note: live still acts too, and the strictest answer wins; "
        "to replace it with strict, set its mode to shadow, or remove it"
    )


def test_policies_of_other_files_are_named_beside_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A canary of a policy in another file is checked along with that one; the file itself may be among them."""
    written(tmp_path / "live.json", policy("live", {"pathPrefix": "/"}, **USER))
    strict = policy("strict", {"pathPrefix": "/"}, mode="shadow", **USER)
    strict["spec"]["canary_of"] = "live"
    file = written(tmp_path / "strict.json", strict)

    alone = promote(capsys, file, 25, name="strict")
    beside = promote(capsys, file, 25, "--beside", f"{tmp_path}/./", name="strict")

    assert alone.code == 1
    assert "there is no 'live'" in alone.err
    assert (beside.code, beside.out.count("\n+")) == (0, 3)


def test_what_comes_of_it_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """New warnings are shown, and that a switch of the bundle still holds; old warnings are not."""
    item = policy("p", {"pathPrefix": "/a*"}, mode="shadow", ramp_by=["jwt:org"], **USER)
    file = written(tmp_path / "p.json", item, global_shadow={"enabled": True})

    run = promote(capsys, file, None)

    assert run.err.splitlines() == [
        f"warning: {file}: /policies/0/spec/ramp_by: ramp_by does nothing without enforce_percent: it acts on all callers",
        "note: while global_shadow is on, all policies of the file stay in shadow mode",
    ]


@pytest.mark.skipif(shutil.which("patch") is None, reason="patch is not installed: its view of the diff is NOT tested")
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_patch_makes_the_same_change(capsys: pytest.CaptureFixture[str], tmp_path: Path, end: str) -> None:
    """What is printed is a diff that the usual tools take, whatever the line ends."""
    file = tmp_path / "p.json"
    data = SHADOW.replace(b"\n", b"\r\n") if end == "\r\n" else SHADOW
    file.write_bytes(data + end.encode())
    diff = promote(capsys, file, 25).out
    copy = tmp_path / "copy.json"
    shutil.copy(file, copy)

    subprocess.run(["patch", "--binary", str(copy)], input=diff.encode(), check=True, capture_output=True)
    promote(capsys, file, 25, "--write")

    assert copy.read_bytes() == file.read_bytes() != data + end.encode()


_SPACE = st.text(" \t\r\n", max_size=3)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=3), below, max_size=3),
    max_leaves=8,
)


@st.composite
def spaced(draw: st.DrawFn, value: object) -> str:
    """A value as JSON, with white space wherever it may stand."""
    before, behind = draw(_SPACE), draw(_SPACE)
    if isinstance(value, dict):
        members = [f"{draw(_SPACE)}{json.dumps(key)}{draw(_SPACE)}:{draw(spaced(item))}" for key, item in value.items()]
        return f"{before}{{{','.join(members) or draw(_SPACE)}}}{behind}"
    if isinstance(value, list):
        return f"{before}[{','.join(draw(spaced(item)) for item in value) or draw(_SPACE)}]{behind}"
    return f"{before}{json.dumps(value, ensure_ascii=draw(st.booleans()))}{behind}"


@given(data=st.data(), outer=st.dictionaries(st.text(max_size=3), _VALUES, min_size=2, max_size=4), value=_VALUES)
def test_a_splice_changes_one_member_alone(data: st.DataObject, outer: dict[str, object], value: object) -> None:
    """Whatever the text looks like, one value is replaced, one member added or taken out, and all around it stays."""
    key = data.draw(st.sampled_from(sorted(outer)))
    document = [0, {"spec": outer}]
    text = data.draw(st.sampled_from(["", "\ufeff"])) + data.draw(spaced(document))
    place = (1, "spec", key)

    replaced, removed = replace_value(text, place, value), remove_member(text, place)
    inserted = insert_behind(text, place, "a new key", value)

    assert _read_members(replaced) == [(name, value if name == key else item) for name, item in outer.items()]
    assert _read_members(removed) == [(name, item) for name, item in outer.items() if name != key]
    number = list(outer).index(key) + 1
    assert _read_members(inserted) == [*list(outer.items())[:number], ("a new key", value), *list(outer.items())[number:]]
    assert replace_value(replaced, place, 7) == replace_value(text, place, 7)
    assert _is_insertion(text, inserted)
    assert _is_insertion(removed, text)


def _is_insertion(text: str, longer: str) -> bool:
    """Whether a text is another one with something put into one place of it."""
    same = next((place for place, (one, other) in enumerate(zip(text, longer, strict=False)) if one != other), len(text))
    return longer[same + len(longer) - len(text) :] == text[same:]


def _read_members(text: str) -> list[tuple[str, object]]:
    return list(json.loads(text.removeprefix("\ufeff"))[1]["spec"].items())


def test_a_running_server_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The step is in force as soon as the file has been replaced."""
    with tempfile.TemporaryDirectory(prefix="lg") as name:
        folder = Path(name)
        write_policies(folder, policy("p", {"pathPrefix": "/"}, mode="shadow", **USER))
        file = folder / "policies" / "policies.json"
        server = Loopguard(folder)
        try:
            for percent in (25, 50):
                assert promote(capsys, file, percent, "--write").code == 0
                eventually(lambda: server.metric("policy_enforce_percent", policy="p") == percent, f"{percent} percent")  # noqa: B023  # called at once
                assert json.loads(server.get("/policies")[1])["modes"] == {"p": "enforce"}
            assert promote(capsys, file, None, "--write").code == 0
            eventually(lambda: 'policy_enforce_percent{policy="p"}' not in server.get("/metrics")[1], "all callers")
            assert server.metric("policy_reloads_total", result="error") == 0
        finally:
            server.stop()
