"""`loopguard check-envoy` on a running Envoy."""

import json

import pytest
import yaml

from tests.support.check_envoy import CHAT, edited, put, without_an_end
from tests.support.command import Run
from tests.support.harness import stack


def test_running_envoy_has_the_findings_of_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    small = put("/static_resources/listeners/0/per_connection_buffer_limit_bytes", 65_535)

    with stack(
        CHAT,
        edit=lambda text: json.dumps(edited(yaml.safe_load(text), without_an_end, small)),
        hasty=True,
    ) as made:
        run = Run(
            capsys, "check-envoy", "--json", "--admin", f"http://127.0.0.1:{made.envoy.admin_port}"
        )

    told = json.loads(run.out)
    assert run.code == 1
    assert [item["code"] for item in told["findings"]] == ["buffer-limit", "request-timeout"]
    assert all("/static_listeners/0/listener" in item["pointer"] for item in told["findings"])
    # The file says that it is meant
    assert [item["code"] for item in told["notes"]] == ["path-parameters"]
    assert [route["guarded"] for route in told["routes"]] == [True, False]
