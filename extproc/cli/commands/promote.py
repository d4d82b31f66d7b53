"""`loopguard promote`: makes a policy act on more callers, by editing its file and no other byte in it."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from extproc.cli.commands import check_paths
from extproc.errors import LoopguardError, UsageError
from extproc.logs import escape_controls
from extproc.objects import Place
from extproc.policy.bundle import EVERYBODY, SHADOW
from extproc.policy.files import read_files
from extproc.policy.loader import PolicySet, parse
from extproc.policy.splice import insert_behind, remove_member, replace_value
from extproc.policy.strict_json import decode

HELP = "make a policy act on more callers, or on all of them"
EXAMPLES = """examples:
  loopguard promote policies/strict.json --policy strict --percent 25
  loopguard promote policies/strict.json --policy strict --percent 25 --write
  loopguard promote policies/strict.json --policy strict --beside policies/ --write

Prints the change as a unified diff, and makes it only with --write. A running server reloads the file.

exit code: 0 good, or nothing to change; 1 the file is not valid, before or after the change"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the policy file")
    parser.add_argument("--policy", required=True, metavar="ID", help="the policy in FILE")
    parser.add_argument(
        "--percent",
        type=int,
        default=EVERYBODY,
        metavar="N",
        help=f"share of the callers to act on, 1 to {EVERYBODY} (default: all)",
    )
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="PATH",
        help="policy files or directories loaded along with FILE; repeatable",
    )
    parser.add_argument("--write", action="store_true", help="change the file")


def run(options: argparse.Namespace) -> int:
    if not 1 <= options.percent <= EVERYBODY:
        raise UsageError(f"--percent must be 1 to {EVERYBODY}, not {options.percent}")
    file, now = options.file, datetime.now(UTC)
    files = _read_files(file, options.beside)
    known = parse(files, now)
    place, spec = _find_spec(decode(files[file]).document, options.policy)
    share = _find_share(spec)
    if share == options.percent:
        _print_note(f"nothing to change: {options.policy} already acts on {_describe_share(share)}")
        return 0
    if share > options.percent:
        back = "to lower it, change enforce_percent in the file, or set mode to shadow"
        raise LoopguardError(f"{options.policy} already acts on {_describe_share(share)}, which is more; {back}")
    before = files[file].decode()
    after = _promote(before, place, spec, options.percent)
    promoted = parse({**files, file: after.encode()}, now)
    sys.stdout.writelines(_list_changes(file, before, after))
    for remark in _list_remarks(options, spec, known, promoted):
        _print_note(remark)
    if options.write:
        _write(Path(file), before.encode(), after.encode())
        _print_note(f"written: {options.policy} acts on {_describe_share(options.percent)}")
    return 0


def _list_remarks(options: argparse.Namespace, spec: Mapping[str, Any], known: PolicySet, promoted: PolicySet) -> Iterator[str]:
    """Consequences of the change that the diff does not show."""
    yield from (f"warning: {warning}" for warning in promoted.warnings if warning not in known.warnings)
    if promoted.sources[0].forces_shadow(datetime.now(UTC)):
        yield "note: while global_shadow is on, all policies of the file stay in shadow mode"
    live = spec.get("canary_of")
    if live is not None:
        stays = f"note: {live} still acts too, and the strictest answer wins"
        yield f"{stays}; to replace it with {options.policy}, set its mode to shadow, or remove it"


def _print_note(text: str) -> None:
    """Print beside the diff, which may be piped elsewhere."""
    print(escape_controls(text), file=sys.stderr)


def _read_files(file: str, beside: Sequence[str]) -> dict[str, bytes]:
    """The policy file and the files loaded with it; raises UsageError or BundleErrors if something cannot be read."""
    check_paths([file, *beside])
    if Path(file).is_dir():
        raise UsageError(f"{file} is a directory; give the file in it that has the policy")
    files = read_files([file])
    others = read_files(beside)
    return {**files, **{name: data for name, data in others.items() if not Path(name).samefile(file)}}


def _find_spec(document: Any, policy: str) -> tuple[Place, dict[str, Any]]:  # noqa: ANN401  # raw JSON
    """The place of a policy's spec in a valid policy file, and the spec; raises UsageError if there is no such policy."""
    entries: dict[Place, Any] = {(): document}
    if isinstance(document, list):
        entries = {(number,): entry for number, entry in enumerate(document)}
    elif "policies" in document:
        entries = {("policies", number): entry for number, entry in enumerate(document["policies"])}
    for place, entry in entries.items():
        if entry["id"] == policy:
            return (*place, "spec"), entry["spec"]
    close = difflib.get_close_matches(policy, [entry["id"] for entry in entries.values()], n=1)
    raise UsageError(f"the file has no policy {policy!r}{f'; did you mean {close[0]!r}?' if close else ''}")


def _find_share(spec: Mapping[str, Any]) -> int:
    """The percentage of its callers that a policy acts on; 0 in shadow mode."""
    if spec.get("mode") == SHADOW:
        return 0
    percent = spec.get("enforce_percent")
    return percent if isinstance(percent, int) else EVERYBODY


def _describe_share(percent: int) -> str:
    return "all callers" if percent == EVERYBODY else f"{percent} percent of its callers"


def _promote(text: str, place: Place, spec: Mapping[str, Any], percent: int) -> str:
    """The text of a policy file in which the policy with the spec at this place acts on a larger share."""
    if spec.get("mode") == SHADOW:
        text = replace_value(text, (*place, "mode"), "enforce")
    if "enforce_percent" in spec:
        text = replace_value(text, (*place, "enforce_percent"), percent)
    elif percent < EVERYBODY:  # it was in shadow: a policy that acts on all callers cannot act on more
        text = insert_behind(text, (*place, "mode"), "enforce_percent", percent)
    if percent == EVERYBODY and spec.get("canary_of") is not None:
        text = remove_member(text, (*place, "canary_of"))  # no caller is only watched any more
    return text


def _list_changes(file: str, before: str, after: str) -> Iterator[str]:
    """Lines of a unified diff, each with its end, for `patch` and `git apply`."""
    for line in difflib.unified_diff(_split_lines(before), _split_lines(after), file, file):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _split_lines(text: str) -> list[str]:
    """Lines with their ends; `splitlines` also splits at characters that a JSON string may contain."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _write(file: Path, before: bytes, after: bytes) -> None:
    """Replace the file atomically, so that it is never read half-written. After a LoopguardError, the old one is unchanged."""
    if file.is_symlink():
        place = "change its target, or the ConfigMap if Kubernetes mounted it"
        raise LoopguardError(f"{file} is a symbolic link, which is not replaced; {place}")
    try:
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")  # a name that is not read as a policy
        try:
            with os.fdopen(handle, "wb") as opened:
                _keep_owner(handle, file.stat())
                opened.write(after)
                opened.flush()
                os.fsync(handle)
            if file.read_bytes() != before:
                raise LoopguardError(f"{file} was changed by another program; nothing was written")
            Path(name).replace(file)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise LoopguardError(f"{file} cannot be written: {error.strerror}; nothing was changed") from None


def _keep_owner(handle: int, was: os.stat_result) -> None:
    """Give a new file the mode of the old one, and its owner if permitted."""
    with suppress(PermissionError):
        os.fchown(handle, was.st_uid, was.st_gid)
    os.fchmod(handle, stat.S_IMODE(was.st_mode))
