"""A provider and an agent to try Loopguard with: the agent repeats a call that fails.

compose.yaml starts `demo.py provider HOST:PORT` and `demo.py agent URL`.
"""  # noqa: INP001  # a script beside its data, not a package
# ruff: noqa: D102, D103, T201  # it prints what the agent does

import json
import sys
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

CALL = {"name": "read_file", "arguments": '{"path": "/etc/app.yml"}'}
RESULT = "error: no such file"
TURNS = 30


class Provider(BaseHTTPRequestHandler):
    """Asks for the same file until the newest message has a note."""

    def do_POST(self) -> None:
        messages = json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"]
        answer: dict[str, Any] = {"role": "assistant", "content": "The file is missing."}
        if "~loopguard~" not in messages[-1]["content"]:
            call = {"id": f"call_{len(messages)}", "type": "function", "function": CALL}
            answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        self.send_response(HTTPStatus.OK)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"index": 0, "message": answer}]}).encode())


def ask(address: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    headers = {"content-type": "application/json", "authorization": "Bearer demo"}
    body = json.dumps({"model": "demo", "messages": messages}).encode()
    request = Request(f"{address}/v1/chat/completions", body, headers)  # noqa: S310  # our own
    while True:
        try:
            with urlopen(request) as answer:  # noqa: S310
                found: dict[str, Any] = json.load(answer)["choices"][0]["message"]
                return found
        except HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
        except URLError:
            pass
        print("waiting for Envoy ...", flush=True)
        time.sleep(1)


def run_agent(address: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Why does the app not start?"}]
    for turn in range(1, TURNS + 1):
        try:
            answer = ask(address, messages)
        except HTTPError as error:
            sys.exit(f"{turn:2}  refused: {error.read().decode()}")
        if "tool_calls" not in answer:
            print(f"{turn:2}  answers: {answer['content']}", flush=True)
            return
        print(f"{turn:2}  read_file(path=/etc/app.yml): {RESULT}", flush=True)
        call = answer["tool_calls"][0]["id"]
        messages += [answer, {"role": "tool", "tool_call_id": call, "content": RESULT}]
        time.sleep(1)


if __name__ == "__main__":
    role, place = sys.argv[1:]
    if role == "agent":
        run_agent(place)
    else:
        host, _, port = place.rpartition(":")
        ThreadingHTTPServer((host, int(port)), Provider).serve_forever()
