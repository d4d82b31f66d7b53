"""A new API is one new file that is found by itself; this one is made up."""

import json
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
import yaml

from extproc.apis import COUNT_PLACES, MODEL_PLACES, open_conversation, read_counts
from extproc.cli.envoy_config.usage import write_event_rules, write_rules
from extproc.ext_proc.changes.narrow import Tools, narrow
from extproc.request.document import Document, NotCounted
from extproc.request.http import HttpRequest
from extproc.request.secrets import ANYWHERE
from extproc.sessions.rates import read_model
from tests.support import ROOT
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.service import decoded, exchange, make_service, metadata_of

PATH = "/machines/m%2D1/talk"

# What the import system does for `import extproc.apis`, with one more folder in which files are
# found.
_START = """
import json, sys
from importlib.util import find_spec, module_from_spec
spec = find_spec("extproc.apis")
spec.submodule_search_locations.append(sys.argv[1])
sys.modules["extproc.apis"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["extproc.apis"])
from tests.unit.apis.test_adding_an_api import observe
print(json.dumps(observe()))
"""

Seen = dict[str, Any]


def observe() -> Seen:
    """What becomes of requests to the new API, in a process that has its file."""
    write_dialogue = import_module(
        "extproc.apis.acme"
    ).write_dialogue  # it is there in no other process

    def ask(turns: int, **spec: Any) -> Seen:  # noqa: ANN401  # of a policy
        document = policy("p", ANY, limit_keys=["header:x-user-id"], similarity="turns", **spec)
        content = json.dumps({**write_dialogue(turns), "reply_to": "a@b"}).encode()
        answer = decoded(
            exchange(make_service(document), headers(PATH, x_user_id="u"), body(content))[-1]
        )
        return {
            "told": metadata_of(answer),
            "sent_on": answer.request_body.response.body_mutation.body.decode(),
            "refused": answer.immediate_response.body.decode(),
            "original": content.decode(),
        }

    content = json.dumps(write_dialogue(1)).encode()
    request = HttpRequest("POST", PATH)
    return {
        "steered": ask(3, action="steer", threshold_identical_requests=3),
        "refused": ask(3, action="reject", threshold_identical_requests=3),
        "completed": ask(
            3, action="reject", threshold_identical_requests=3, refuse_as="completion"
        ),
        "fewer": json.loads(narrow(request, content, Tools(["ring"]))),
        "without": json.loads(narrow(request, content, Tools(None))),
        "model": read_model(request.path, content),
        "counts": [
            read_counts({b"input": 7.0}),
            read_counts({b"bill": '{"heard": 7, "spoken": 2}'}),
        ],
        "rules": [yaml.safe_load(write_rules()), yaml.safe_load(write_event_rules())],
        "places": [COUNT_PLACES["output"], MODEL_PLACES],
        "credentials": sorted(ANYWHERE),
        "speakers": [
            message.speaker for message in open_conversation(Document(content)).read_backwards()
        ],
    }


@pytest.fixture(scope="module")
def seen() -> Seen:
    command = [sys.executable, "-P", "-c", _START, str(ROOT / "tests" / "support" / "made_up")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: Seen = json.loads(done.stdout)
    return found


def test_api_is_unknown_without_its_file() -> None:
    with pytest.raises(NotCounted, match="no_messages"):
        open_conversation(Document(b'{"dialogue": [{"by": "you", "says": "Get in."}]}'))
    assert "header:x-acme-key" not in ANYWHERE


@pytest.mark.slow
def test_conversation_of_new_api_is_read_and_steered(seen: Seen) -> None:
    assert seen["speakers"] == ["tool", "assistant", "user"]
    steered = seen["steered"]
    assert (steered["told"]["action"], steered["told"]["tool"], steered["told"]["count"]) == (
        "steer",
        "ring",
        3,
    )
    start, end = steered["original"].rsplit("nobody is in", 1)
    assert steered["sent_on"].startswith(f"{start}nobody is in\\n\\n")
    assert steered["sent_on"].endswith(end)
    assert (
        json.loads(steered["sent_on"])["dialogue"][-1]["says"].count(
            "3 of the last 3 turns were ring"
        )
        == 1
    )


@pytest.mark.slow
def test_refusals_have_shape_of_new_api(seen: Seen) -> None:
    refused = json.loads(seen["refused"]["refused"])
    assert refused.keys() == {"oops", "to"}
    assert refused["to"] == "a@b"
    assert "(recursive_loop_detected)" in refused["oops"]
    completed = json.loads(seen["completed"]["refused"])
    assert completed["by_engine"] == "m-1"
    assert refused["oops"] in completed["machine"]


def test_tools_of_new_api_are_narrowed(seen: Seen) -> None:
    assert seen["fewer"]["buttons"] == [{"labelled": {"name": "knock"}}]
    assert len(seen["without"]["buttons"]) == 2
    assert seen["without"]["may_push"] == "nothing"


def test_model_and_usage_of_new_api_are_read(seen: Seen) -> None:
    assert seen["model"] == "m-1"
    assert seen["counts"] == [{"input": 7}, {"input": 7, "output": 2}]
    document, events = seen["rules"]
    assert [{"key": "bill"}, {"key": "heard"}] in [rule["selectors"] for rule in document]
    assert [{"key": "bill"}] in [rule["rule"]["selectors"] for rule in events]
    outputs, models = seen["places"]
    assert "bill.spoken" in outputs
    assert "by_engine" in models


def test_credential_header_of_new_api_is_secret(seen: Seen) -> None:
    assert "header:x-acme-key" in seen["credentials"]
