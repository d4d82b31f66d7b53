"""`loopguard check-envoy` on a running Envoy."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.support.check_envoy import CHAT, find, run, without_an_end
from tests.support.harness import stack


def test_a_running_envoy_is_told_as_its_file_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Its config dump, in which defaults are left out, has the same findings as the file, each in its place there."""

    def edit(text: str) -> str:
        document = yaml.safe_load(text)
        without_an_end(document)
        find(document, "/static_resources/listeners/0")["per_connection_buffer_limit_bytes"] = 65_535
        return json.dumps(document)

    with stack(CHAT, edit=edit, hasty=True) as made:
        code, out, _ = run(capsys, "--json", "--admin", f"http://127.0.0.1:{made.envoy.admin_port}")

    told = json.loads(out)
    assert code == 1
    assert [item["code"] for item in told["findings"]] == ["buffer-limit", "request-timeout"]
    assert all("/static_listeners/0/listener" in item["pointer"] for item in told["findings"])
    assert [item["code"] for item in told["notes"]] == ["path-parameters"]  # the file says that it is meant
    assert [route["guarded"] for route in told["routes"]] == [True, False]
