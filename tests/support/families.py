"""Honest repetition of agents and people in many variants, and the same as loops."""

from collections.abc import Callable
from itertools import product

from tests.support.turn_writers import Did

# Variants of a family, each a conversation of `TURNS` turns.
Family = Callable[[], list[list[Did]]]

# One less than the threshold of a weak loop.
TURNS = 13

LONG = "2026-11-24 page 1: nothing that was not here before. " * 6
FATAL = "error: permission denied for role agent"


def call(tool: str, result: str, number: int, **given: object) -> Did:
    return Did(((tool, given),), (result,), "", f"Thought no. {number}!", number)


def talk(said: str, words: str, number: int) -> Did:
    return Did((), (), words, said, number)


def same(tool: str, result: str, **given: object) -> list[Did]:
    return [call(tool, result, number, **given) for number in range(1, TURNS + 1)]


def status_polls() -> list[list[Did]]:
    tools = [
        "get_status",
        "poll_job",
        "mcp__ci__get_run",
        "check_deployment",
        "kubectl_rollout_status",
        "bash",
    ]
    results = [
        '{"status": "running", "errors": 0}',
        '{"state": "queued", "error": null}',
        "in progress: 0 failed, 3 pending",
        "Waiting for deployment to finish: 1 of 3 updated replicas are available...",
        "status: 202 Accepted",
        "pending",
    ]
    return [same(tool, result, job=7) for tool, result in product(tools, results)]


def empty_waits() -> list[list[Did]]:
    tools = ["read_terminal", "wait", "bash_output", "write_stdin", "get_output", "sleep"]
    results = [
        "",
        "(no new output)",
        "<no output>",
        "[still running, no new output]",
        "status: running",
        "\n",
    ]
    return [same(tool, result, terminal=1) for tool, result in product(tools, results)]


def coming_up() -> list[list[Did]]:
    tools = ["bash", "http_get", "curl", "check_health", "psql"]
    results = [
        "curl: (7) Failed to connect to localhost port 8080 after 0 ms: Connection refused",
        "HTTP/1.1 503 Service Unavailable",
        "error: 503 Service Temporarily Unavailable",
        "dial tcp 127.0.0.1:5432: connect: connection refused",
        "Error: connect ECONNREFUSED 127.0.0.1:3000",
        "error: request timed out",
        "Error: 429 Too Many Requests, retry after 5 s",
        "error: rate limited, try again later",
        "502 Bad Gateway",
    ]
    return [same(tool, result, url="http://localhost") for tool, result in product(tools, results)]


def pages() -> list[list[Did]]:
    """Pages and scrolling, whose tools report only success."""
    tools = ["scroll_down", "next_page", "browser_scroll", "page_down", "load_more", "press_key"]
    results = ["ok", "Scrolled.", "done", '{"ok": true}', "", "Page scrolled down by 800 px"]
    return [same(tool, result, by=1) for tool, result in product(tools, results)]


def long_watches() -> list[list[Did]]:
    """Long results in which only ages, clocks and durations change."""
    tools = ["get_status", "kubectl", "mcp__ci__get_run", "watch", "get_logs", "check_queue"]
    rows = [
        "web-%d   0/1   ContainerCreating   {0}s\n",
        "app_%d   Up {0} seconds   (health: starting)\n",
        "12:00:{0}Z worker %d is waiting for a build slot\n",
        '{{"step": "deploy %d", "state": "pending", "duration_ms": {0}42}}\n',
        "[2026-11-24T09:30:{0}Z] job-%d is queued\n",
        "node %d: syncing, elapsed: {0}.5s\n",
    ]
    return [
        [
            call(tool, "".join(row % n for n in range(8)).format(at + 10), at)
            for at in range(1, TURNS + 1)
        ]
        for tool, row in product(tools, rows)
    ]


def queues() -> list[list[Did]]:
    tools = ["next_ticket", "pop_job", "fetch_mail", "receive_message", "claim_task"]
    records = [
        '{"id": %d, "opened": "2026-11-%02d"}',
        '{"id":%d,"opened":"2026-11-%02d","state":"open"}',
        "ticket %d, opened 2026-11-%02d: a lamp is broken",
        "id:%d date:2026-11-%02d " + "please look at this as soon as you can. " * 8,
        '{"orderId": 450001%04d, "due": "%02d/12/2026"}',
        "#%d (Nov %02d 2026) error: printer on fire",
        '{"created": "%d", "day": "2026-12-%02d"}',
    ]
    return [
        [call(tool, record % (100 + number, number), number) for number in range(1, TURNS + 1)]
        for tool, record in product(tools, records)
    ]


def handled() -> list[list[Did]]:
    """Many different jobs with the same result."""
    tools = ["close_ticket", "send_mail", "upsert_row", "label_issue", "ack"]
    results = [
        "ok",
        "done",
        '{"ok": true, "errors": []}',
        "1 row affected",
        "",
        "Successfully updated.",
    ]
    return [
        [call(tool, result, number, id=number) for number in range(1, TURNS + 1)]
        for tool, result in product(tools, results)
    ]


def games() -> list[list[Did]]:
    tools = ["step", "move", "advance_time", "act", "roll", "env_step"]
    results = [
        '{"reward": 0.0, "done": false}',
        "You wait.",
        "Nothing happens.",
        "tick",
        "You move on.",
        "the ship sails on",
    ]
    return [same(tool, result, action="forward") for tool, result in product(tools, results)]


def heartbeats() -> list[list[Did]]:
    """A program that asks the same again and again in one conversation of an agent with tools."""
    replies = ["HEARTBEAT_OK", "Nothing new.", "All quiet: no errors.", "Done."]
    prompts = [
        "Heartbeat",
        (
            "Read HEARTBEAT.md if it exists. Follow it strictly. If nothing needs attention, reply "
            "HEARTBEAT_OK."
        ),
        "[cron] check the error log and report failures",
        "It is %d o'clock: anything to do?",
        "Scheduled run: " + "read the inbox, answer what is urgent, and file all the rest. " * 6,
        "continue",
        "Keep going until all tests pass; none may have failed.",
        "ping 2026-11-24T%02d:00:00Z",
    ]
    return [
        [
            talk(reply, prompt.replace("%d", str(n)).replace("%02d", f"{n:02d}"), n)
            for n in range(1, TURNS + 1)
        ]
        for reply, prompt in product(replies, prompts)
    ]


def greetings() -> list[list[Did]]:
    """A person who greets or asks again, and gets the same answer."""
    said = ["hi", "hello?", "Are you there?", "What can you do?", "yes", "thanks"]
    answers = [
        "Hello! How can I help?",
        "I can read and write files.",
        "You're welcome.",
        "Hi!",
        "Yes.",
        "Please tell me more.",
    ]
    return [
        [talk(answer, words, n) for n in range(1, TURNS + 1)]
        for words, answer in product(said, answers)
    ]


def look_ups() -> list[list[Did]]:
    tools = ["get_customer", "search_orders", "find_user", "lookup_sku", "http_get"]
    results = [
        "not found",
        '{"error": "not found"}',
        "error: no such customer",
        "404 Not Found",
        "Error: the record does not exist",
        "no results found",
        "error: no matching rows found",
    ]
    return [
        [call(tool, result, number, id=number) for number in range(1, 2 * TURNS + 1)]
        for tool, result in product(tools, results)
    ]


def asked_again() -> list[list[Did]]:
    """The same work, three times for each wish of a person."""
    tools = ["run_tests", "get_report", "bash", "screenshot", "query", "deploy"]
    results = [
        "error: 3 failed",
        LONG,
        "error: no such file",
        "Traceback: ValueError",
        FATAL,
        "exit code 1",
    ]
    return [
        [
            turn
            for n in range(5)
            for turn in (
                *[call(tool, result, 4 * n + place) for place in (1, 2, 3)],
                talk("It failed.", f"please {'again ' * (n + 1)}", 4 * n + 4),
            )
        ]
        for tool, result in product(tools, results)
    ]


def looked_again() -> list[list[Did]]:
    """A long listing that looks the same after each change, read three times."""
    looks = ["ls", "read_file", "list_files", "mcp__disk__get_tree", "view", "cat"]
    changes = ["cp", "write_file", "edit", "mcp__disk__create_link", "touch", "mv"]
    return [
        [
            turn
            for n in range(5)
            for turn in (
                *[call(look, LONG, 4 * n + place, path=".") for place in (1, 2, 3)],
                call(change, "done", 4 * n + 4, path=f"f{n % 2}"),
            )
        ]
        for look, change in product(looks, changes)
    ]


# None of these is refused before the 14th turn.
HONEST: dict[str, Family] = {
    "status polls": status_polls,
    "empty waits": empty_waits,
    "a service coming up": coming_up,
    "pages": pages,
    "long results in which time moves": long_watches,
    "work queues": queues,
    "the same answer to many deeds": handled,
    "games": games,
    "heartbeats": heartbeats,
    "greetings": greetings,
    "look-ups": look_ups,
    "asked again by a person": asked_again,
    "looked again behind a change": looked_again,
}


def fixed_one_by_one() -> list[list[Did]]:
    """A change and its tests in one call; fewer tests fail each time."""
    tools = ["bash", "run_tests", "edit_and_test", "mcp__ci__apply_patch", "execute"]
    results = [
        "%d failed, 3 passed in 0.41s",
        "exit code 1\nTests: %d failed, 40 total",
        "error: %d of 60 tests failed",
        "Found %d errors in 3 files",
        "FAILED (failures=%d)",
        '{"status": "error", "failed": %d}',
        "error: coverage is below %d %%",
    ]
    return [
        [
            call(tool, result % (60 - number), number, patch=f"change no. {number}: " + "x" * 60)
            for number in range(1, TURNS + 1)
        ]
        for tool, result in product(tools, results)
    ]


def repaired() -> list[list[Did]]:
    """A change, then the tests, which fail with the same words until the last."""
    edits, tests = (
        ["edit", "write_file", "str_replace", "apply_patch", "bash", "sed"],
        ["run_tests", "pytest", "make", "cargo", "go"],
    )
    return [
        [
            call(test, "error: test_a failed", number, target="all")
            if number % 2 == 0
            else call(
                edit,
                "The file has been changed.",
                number,
                patch=f"change no. {number}: " + "x" * 60,
            )
            for number in range(1, 2 * TURNS + 1)
        ]
        for edit, test in product(edits, tests)
    ]


def several_errors() -> list[list[Did]]:
    tools = ["bash", "query", "http_post", "compile", "deploy", "call"]
    names = ["alpha", "beta", "gamma", "delta", "epsilon"]
    errors = [
        "error: unknown column {}",
        "error: missing argument {}",
        "TypeError: {} is no number",
        "fatal: {} is denied",
        "invalid {}",
    ]
    return [
        [
            call(tool, error.format(names[(number + at) % 5]), number, body=f"try no. {number}")
            for number in range(1, TURNS + 1)
        ]
        for (at, error), tool in product(enumerate(errors), tools)
    ]


def watched() -> list[list[Did]]:
    """Several things polled in turn, of which most report news; one has a long output."""
    statuses, logs = (
        ["get_status", "poll_job", "check_build"],
        ["get_logs", "tail_log", "read_output"],
    )
    waits = ["sleep", "wait", "pause", "idle"]
    return [
        [
            call(
                *[
                    (status, f"{number} % done"),
                    (log, f"compiled part no. {number} of 99"),
                    (wait, "ok"),
                ][number % 3],
                number,
                job="j" * 70,
            )
            for number in range(1, 2 * TURNS + 1)
        ]
        for status, log, wait in product(statuses, logs, waits)
    ]


def long_looks() -> list[list[Did]]:
    tools = ["get_status", "query", "search_logs", "mcp__db__list_rows", "fetch", "read_file"]
    results = ["%d rows", "state %d of 40", '{"left": %d}', "page %d", "the newest entry is no. %d"]
    return [
        [
            call(
                tool,
                result % number,
                number,
                select="all of what has come in since the last time I looked, by name and date",
            )
            for number in range(1, TURNS + 1)
        ]
        for tool, result in product(tools, results)
    ]


# No rule may act on these.
PROGRESS: dict[str, Family] = {
    "tests of which fewer fail": fixed_one_by_one,
    "a repair": repaired,
    "other errors each time": several_errors,
    "what is watched": watched,
    "long looks": long_looks,
}


def long_polls() -> list[list[Did]]:
    tools = ["get_status", "kubectl", "mcp__ci__get_run", "watch", "get_logs", "check_queue"]
    tables = [
        "NAME   READY   STATUS\n" + f"{name}-0   0/1   Pending\n" * 12
        for name in ("web", "db", "api", "mail", "job", "etl")
    ]
    return [same(tool, table) for tool, table in product(tools, tables)]


def fatal_services() -> list[list[Did]]:
    """A service that is down and reports a final error for minutes."""
    tools = ["http_get", "curl", "query", "mcp__crm__get_lead", "fetch", "ask"]
    errors = [
        "error: internal",
        "500 Internal Server Error: exception",
        "error: database disk image is malformed",
        "fatal error",
        FATAL,
        "failed",
    ]
    return [same(tool, error) for tool, error in product(tools, errors)]


def fatal_limits() -> list[list[Did]]:
    tools = ["http_get", "curl", "query", "mcp__crm__get_lead", "fetch", "ask"]
    errors = [
        "error: quota exhausted",
        "error: denied",
        "invalid: plan limit",
        "error 1015",
        "request failed",
        "error: not allowed",
    ]
    return [same(tool, error) for tool, error in product(tools, errors)]


# These look like loops; their tools need an exemption.
UNTELLABLE: dict[str, Family] = {
    "long polls": long_polls,
    "a service that fails fatally": fatal_services,
    "rate limits told as fatal errors": fatal_limits,
}


def make_loop(turns: list[Did], result: str) -> list[Did]:
    """The same agent, stuck: its first call, or the given tool, returns this every time."""
    calls = turns[0].calls or (("check", {}),)
    return [
        Did(calls, (result,), "", f"Thought no. {number}!", number)
        for number in range(1, TURNS + 1)
    ]
