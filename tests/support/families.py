"""Honest repetition of agents and people in many variants, and the same as loops."""

from collections.abc import Callable, Sequence
from itertools import product
from random import Random

from tests.support.turn_writers import Did

# Variants of a family, each a conversation of `TURNS` turns.
Family = Callable[[], list[list[Did]]]

# One less than the threshold of a weak loop.
TURNS = 13

LONG = "2026-11-24 page 1: nothing that was not here before. " * 6
FATAL = "error: permission denied for role agent"


EMPTY = ["No matches found", "[]", '{"results": []}', "(0 rows)", "", '{"hits": [], "took": 3}']


def call(tool: str, result: str, number: int, **given: object) -> Did:
    return Did(((tool, given),), (result,), "", f"Thought no. {number}!", number)


def talk(said: str, words: str, number: int) -> Did:
    return Did((), (), words, said, number)


def same(tool: str, result: str, **given: object) -> list[Did]:
    return [call(tool, result, number, **given) for number in range(1, TURNS + 1)]


def cross(
    ones: Sequence[str], others: Sequence[str], make: Callable[[str, str], list[Did]]
) -> Family:
    return lambda: [make(one, other) for one, other in product(ones, others)]


def each(make: Callable[[int], Did], turns: int = TURNS) -> list[Did]:
    return [make(number) for number in range(1, turns + 1)]


def four_each(make: Callable[[int], list[Did]]) -> list[Did]:
    return [turn for first in range(0, 20, 4) for turn in make(first)]


# None of these is refused before the 14th turn.
HONEST: dict[str, Family] = {
    "status polls": cross(
        [
            "get_status",
            "poll_job",
            "mcp__ci__get_run",
            "check_deployment",
            "kubectl_rollout_status",
            "bash",
        ],
        [
            '{"status": "running", "errors": 0}',
            '{"state": "queued", "error": null}',
            "in progress: 0 failed, 3 pending",
            "Waiting for deployment to finish: 1 of 3 updated replicas are available...",
            "status: 202 Accepted",
            "pending",
        ],
        lambda tool, result: same(tool, result, job=7),
    ),
    "empty waits": cross(
        ["read_terminal", "wait", "bash_output", "write_stdin", "get_output", "sleep"],
        [
            "",
            "(no new output)",
            "<no output>",
            "[still running, no new output]",
            "status: running",
            "\n",
        ],
        lambda tool, result: same(tool, result, terminal=1),
    ),
    "a service coming up": cross(
        ["bash", "http_get", "curl", "check_health", "psql"],
        [
            "curl: (7) Failed to connect to localhost port 8080 after 0 ms: Connection refused",
            "HTTP/1.1 503 Service Unavailable",
            "error: 503 Service Temporarily Unavailable",
            "dial tcp 127.0.0.1:5432: connect: connection refused",
            "Error: connect ECONNREFUSED 127.0.0.1:3000",
            "error: request timed out",
            "Error: 429 Too Many Requests, retry after 5 s",
            "error: rate limited, try again later",
            "502 Bad Gateway",
        ],
        lambda tool, result: same(tool, result, url="http://localhost"),
    ),
    # Pages and scrolling, whose tools report only success.
    "pages": cross(
        ["scroll_down", "next_page", "browser_scroll", "page_down", "load_more", "press_key"],
        ["ok", "Scrolled.", "done", '{"ok": true}', "", "Page scrolled down by 800 px"],
        lambda tool, result: same(tool, result, by=1),
    ),
    # Long results in which only ages, clocks and durations change.
    "long results in which time moves": cross(
        ["get_status", "kubectl", "mcp__ci__get_run", "watch", "get_logs", "check_queue"],
        [
            "web-%d   0/1   ContainerCreating   {0}s\n",
            "app_%d   Up {0} seconds   (health: starting)\n",
            "12:00:{0}Z worker %d is waiting for a build slot\n",
            '{{"step": "deploy %d", "state": "pending", "duration_ms": {0}42}}\n',
            "[2026-11-24T09:30:{0}Z] job-%d is queued\n",
            "node %d: syncing, elapsed: {0}.5s\n",
        ],
        lambda tool, row: each(
            lambda at: call(tool, "".join(row % n for n in range(8)).format(at + 10), at)
        ),
    ),
    "work queues": cross(
        ["next_ticket", "pop_job", "fetch_mail", "receive_message", "claim_task"],
        [
            '{"id": %d, "opened": "2026-11-%02d"}',
            '{"id":%d,"opened":"2026-11-%02d","state":"open"}',
            "ticket %d, opened 2026-11-%02d: a lamp is broken",
            "id:%d date:2026-11-%02d " + "please look at this as soon as you can. " * 8,
            '{"orderId": 450001%04d, "due": "%02d/12/2026"}',
            "#%d (Nov %02d 2026) error: printer on fire",
            '{"created": "%d", "day": "2026-12-%02d"}',
        ],
        lambda tool, record: each(lambda at: call(tool, record % (100 + at, at), at)),
    ),
    # Many different jobs with the same result.
    "the same answer to many deeds": cross(
        ["close_ticket", "send_mail", "upsert_row", "label_issue", "ack"],
        ["ok", "done", '{"ok": true, "errors": []}', "1 row affected", "", "Successfully updated."],
        lambda tool, result: each(lambda at: call(tool, result, at, id=at)),
    ),
    "games": cross(
        ["step", "move", "advance_time", "act", "roll", "env_step"],
        [
            '{"reward": 0.0, "done": false}',
            "You wait.",
            "Nothing happens.",
            "tick",
            "You move on.",
            "the ship sails on",
        ],
        lambda tool, result: same(tool, result, action="forward"),
    ),
    # A program that asks the same again and again in one conversation of an agent with tools.
    "heartbeats": cross(
        ["HEARTBEAT_OK", "Nothing new.", "All quiet: no errors.", "Done."],
        [
            "Heartbeat",
            (
                "Read HEARTBEAT.md if it exists. Follow it strictly. If nothing needs attention, "
                "reply HEARTBEAT_OK."
            ),
            "[cron] check the error log and report failures",
            "It is %d o'clock: anything to do?",
            "Scheduled run: "
            + "read the inbox, answer what is urgent, and file all the rest. " * 6,
            "continue",
            "Keep going until all tests pass; none may have failed.",
            "ping 2026-11-24T%02d:00:00Z",
        ],
        lambda reply, prompt: each(
            lambda at: talk(reply, prompt.replace("%d", str(at)).replace("%02d", f"{at:02d}"), at)
        ),
    ),
    # A person who greets or asks again, and gets the same answer.
    "greetings": cross(
        ["hi", "hello?", "Are you there?", "What can you do?", "yes", "thanks"],
        [
            "Hello! How can I help?",
            "I can read and write files.",
            "You're welcome.",
            "Hi!",
            "Yes.",
            "Please tell me more.",
        ],
        lambda words, answer: each(lambda at: talk(answer, words, at)),
    ),
    "look-ups": cross(
        ["get_customer", "search_orders", "find_user", "lookup_sku", "http_get"],
        [
            "not found",
            '{"error": "not found"}',
            "error: no such customer",
            "404 Not Found",
            "Error: the record does not exist",
            "no results found",
            "error: no matching rows found",
        ],
        lambda tool, result: each(lambda at: call(tool, result, at, id=at), 2 * TURNS),
    ),
    # Different files are searched for different words that must not occur.
    "audits": cross(
        ["grep", "search_code", "Grep", "mcp__github__search_code", "find_references", "glob"],
        EMPTY,
        lambda tool, result: each(
            lambda at: call(tool, result, at, pattern=f"word{at % 5}", path=f"{at}.py"), 2 * TURNS
        ),
    ),
    # Two things are watched in turn; each changes in every second round.
    "slow changes": cross(
        ["get_status", "poll_job", "check_build", "kubectl", "ping", "mcp__ci__get_run"],
        ["sleep", "wait", "get_logs", "list_queue", "tail_log"],
        lambda one, other: each(
            lambda at: call([one, other][at % 2], f"{(at + at % 2 * 2) // 4} done", at, of=7),
            2 * TURNS,
        ),
    ),
    # The same work, three times for each wish of a person.
    "asked again by a person": cross(
        ["run_tests", "get_report", "bash", "screenshot", "query", "deploy"],
        [
            "error: 3 failed",
            LONG,
            "error: no such file",
            "Traceback: ValueError",
            FATAL,
            "exit code 1",
        ],
        lambda tool, result: four_each(
            lambda first: [
                *[call(tool, result, first + place) for place in (1, 2, 3)],
                talk("It failed.", f"please {'again ' * (first // 4 + 1)}", first + 4),
            ]
        ),
    ),
    # A long listing that looks the same after each change, read three times.
    "looked again behind a change": cross(
        ["ls", "read_file", "list_files", "mcp__disk__get_tree", "view", "cat"],
        ["cp", "write_file", "edit", "mcp__disk__create_link", "touch", "mv"],
        lambda look, change: four_each(
            lambda first: [
                *[call(look, LONG, first + place, path=".") for place in (1, 2, 3)],
                call(change, "done", first + 4, path=f"f{first // 4 % 2}"),
            ]
        ),
    ),
}


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
        for status, log, wait in product(statuses, logs, ["sleep", "wait", "pause", "idle"])
    ]


def read_between(tool: str, error: str, number: int) -> Did:
    """Every third turn is this call, and fails; the others read something else."""
    if number % 3:
        return call("read_file", f"the text of file {number}", number, path=f"f{number}.py")
    return call(tool, error.format(number), number, attempted=f"way no. {number}")


_ATTEMPTS = ["apply_patch", "execute_sql", "bash", "deploy", "click", "mcp__shop__call"]
_UNREPAIRED = [
    "error: patch does not apply at line {}",
    "error: job {} is broken",
    "TypeError: 'NoneType' object is not callable ({})",
    "fatal: worker {} has no permission",
    "SyntaxError: invalid syntax in try {}",
    '{{"error": "constraint violated", "id": {}}}',
]

# No rule may act on these.
PROGRESS: dict[str, Family] = {
    # A change and its tests in one call; fewer tests fail each time.
    "fewer failing tests each time": cross(
        ["bash", "run_tests", "edit_and_test", "mcp__ci__apply_patch", "execute"],
        [
            "%d failed, 3 passed in 0.41s",
            "exit code 1\nTests: %d failed, 40 total",
            "error: %d of 60 tests failed",
            "Found %d errors in 3 files",
            "FAILED (failures=%d)",
            '{"status": "error", "failed": %d}',
            "error: coverage is below %d %%",
        ],
        lambda tool, result: each(
            lambda at: call(tool, result % (60 - at), at, patch=f"change no. {at}: " + "x" * 60)
        ),
    ),
    # A change, then the tests, which fail with the same words until the last.
    "a repair": cross(
        ["edit", "write_file", "str_replace", "apply_patch", "bash", "sed"],
        ["run_tests", "pytest", "make", "cargo", "go"],
        lambda edit, test: each(
            lambda at: (
                call(edit, "The file has been changed.", at, patch=f"change no. {at}: " + "x" * 60)
                if at % 2
                else call(test, "error: test_a failed", at, target="all")
            ),
            2 * TURNS,
        ),
    ),
    # The same error seven times, before a change that may repair it; twice.
    "a late repair": cross(
        _ATTEMPTS,
        _UNREPAIRED,
        lambda tool, error: each(
            lambda at: (
                call("bash", "done", at, command=f"sed -i {at}d app.py")
                if at % 23 == 0
                else read_between(tool, error, at)
            ),
            44,
        ),
    ),
    # A third of many look-ups finds nothing, or comes while a service is down.
    "look-ups that miss": cross(
        ["get_customer", "search_orders", "find_user", "lookup_sku", "fetch_page"],
        [
            "error: no such customer",
            "404 Not Found",
            "error: no matching rows found",
            "error: 503 Service Unavailable",
            "Error: connect ECONNREFUSED 127.0.0.1:3000",
            "error: permission denied for this record",
        ],
        lambda tool, result: each(lambda at: read_between(tool, result, at), 40),
    ),
    # Every second search finds something.
    "searches that find half": cross(
        ["web_search", "grep", "find_file", "mcp__docs__search", "query_db"],
        EMPTY,
        lambda tool, result: each(
            lambda at: call(tool, result if at % 2 else f"page {at}", at, query=f"word {at}"), 40
        ),
    ),
    # The same steps for each file.
    "the same round for each file": cross(
        ["edit", "write_file", "str_replace", "apply_patch", "insert", "mcp__disk__write_file"],
        ["run_tests", "pytest", "make", "cargo", "go"],
        lambda edit, test: each(
            lambda at: [
                call(test, "12 passed", at, target="all"),
                call("read_file", f"file {at}", at, path=f"{at}.py"),
                call(edit, "ok", at, path=f"{at}.py"),
            ][at % 3],
            30,
        ),
    ),
    # Good news, and empty results of tools that do not search.
    "all is well": cross(
        ["get_diagnostics", "check_file", "list_alerts", "bash", "send_mail", "mcp__db__describe"],
        [
            '{"errors": []}',
            '{"ok": true, "issues": []}',
            "No errors found",
            "0 problems",
            '{"state": "running", "error": null}',
            "OK",
        ],
        lambda tool, result: each(lambda at: call(tool, result, at, path=f"{at}.py"), 2 * TURNS),
    ),
    "other errors each time": several_errors,
    "what is watched": watched,
    # Steps of a game, whose tools have long names, and commands that watch something.
    "the same step, with news": cross(
        [
            "move_the_robot_arm_by_one_step_in_the_direction_that_it_faces",
            "add_one_more_item_to_the_basket_of_the_customer_who_is_here",
            "mcp__simulation_of_a_city_with_many_people__set_clock_forward",
            "bash",
            "terminal",
            "python",
        ],
        ["%d of 40", "%d steps are done", '{"left": %d}', "tick no. %d", "day %d, no rain"],
        lambda tool, result: each(
            lambda at: (
                call(tool, result % at, at, by=1)
                if len(tool) > 40
                else call(tool, result % at, at, command="curl -s http://ci/runs/7 | jq .jobs " * 2)
            )
        ),
    ),
    "long looks": cross(
        ["get_status", "query", "search_logs", "mcp__db__list_rows", "fetch", "read_file"],
        ["%d rows", "state %d of 40", '{"left": %d}', "page %d", "the newest entry is no. %d"],
        lambda tool, result: each(
            lambda at: call(
                tool,
                result % at,
                at,
                select="all of what has come in since the last time I looked, by name and date",
            )
        ),
    ),
}

_SERVICES = ["http_get", "curl", "query", "mcp__crm__get_lead", "fetch", "ask"]
# These look like loops; their tools need an exemption.
UNTELLABLE: dict[str, Family] = {
    "long polls": cross(
        ["get_status", "kubectl", "mcp__ci__get_run", "watch", "get_logs", "check_queue"],
        [
            "NAME   READY   STATUS\n" + f"{name}-0   0/1   Pending\n" * 12
            for name in ("web", "db", "api", "mail", "job", "etl")
        ],
        same,
    ),
    # A service that is down and reports a final error for minutes.
    "a service that fails fatally": cross(
        _SERVICES,
        [
            "error: internal",
            "500 Internal Server Error: exception",
            "error: database disk image is malformed",
            "fatal error",
            FATAL,
            "failed",
        ],
        same,
    ),
    "rate limits told as fatal errors": cross(
        _SERVICES,
        [
            "error: quota exhausted",
            "error: denied",
            "invalid: plan limit",
            "error 1015",
            "request failed",
            "error: not allowed",
        ],
        same,
    ),
}


def make_loop(turns: list[Did], result: str) -> list[Did]:
    """The same agent, stuck: its first call, or the given tool, returns this every time."""
    calls = turns[0].calls or (("check", {}),)
    return [
        Did(calls, (result,), "", f"Thought no. {number}!", number)
        for number in range(1, TURNS + 1)
    ]


# Turns of a loop: enough that weak ones are refused.
LOOP_TURNS = 18
_TOOLS = ["bash", "read_file", "query", "mcp__crm__get_lead", "open_page", "call"]
_ERRORS = [
    FATAL,
    "ValueError: not a number",
    "fatal: not a git repository",
    "exit code 1",
    "KeyError: 'a'",
]


def stick(results: Sequence[str], make: Callable[[str, str, int], Did]) -> Family:
    """Loops of each tool with each result."""
    return cross(
        _TOOLS, results, lambda tool, result: each(lambda n: make(tool, result, n), LOOP_TURNS)
    )


def wander(tool: str, seed: str) -> list[Did]:
    """Pages in another order each time, with a new one in every eight."""
    dice = Random(seed)
    pages = list("abcdefg")
    for number in range(4):
        pages += [f"note {number}", *dice.sample("abcdefg", 7)]
    return [call(tool, f"text of {page}", n, page=page) for n, page in enumerate(pages, 1)]


LOOPS: dict[str, Family] = {
    "the same call fails alike": stick(_ERRORS, lambda tool, error, n: call(tool, error, n, of=1)),
    "the same call has the same short answer": stick(
        ["a.py b.py", "ok", '{"rows": 3}', "clean", "3 items"],
        lambda tool, result, n: call(tool, result, n, of=1),
    ),
    "two calls in turn": stick(
        _ERRORS, lambda tool, error, n: call(tool, f"{error} {n % 2}", n, of=n % 2)
    ),
    "six calls in turn": stick(
        _ERRORS, lambda tool, error, n: call(tool, f"{error} {n % 6}", n, of=n % 6)
    ),
    "every call fails alike": stick(_ERRORS, lambda tool, error, n: call(tool, error, n, of=n)),
    "other answers, the same complaint": stick(
        ["age", "address.street", "items.3.price", "kind", "name"],
        lambda tool, field, n: call(
            tool,
            f"1 validation error for Person\n{field}\n  Input should be a valid integer "
            f"[type=int_type, input_value='about {n}', input_type=str]",
            n,
            **{field: f"about {n}"},
        ),
    ),
    "talk to a program": cross(
        ["the key", "a person", "the tests", "the network", "a review", "the budget"],
        [
            "Stop hook feedback: the goal is not reached yet. Continue to work on it.",
            "You have not finished. Please proceed to the next step on your own (attempt {}).",
            "Auto-continue: {} tasks are left in the list, so keep going until it is empty.",
            "No tool call was needed? Then say so, or go on with the plan that you made.",
            "It is {}:00 now. Check whether there is anything new to do, and do it.",
        ],
        lambda missing, words: each(
            lambda n: talk(f"I wait for {missing}, now {n} times.", words.format(n), n), LOOP_TURNS
        ),
    ),
    # Only reads in between.
    "the same error in every third turn": cross(
        _ATTEMPTS,
        _UNREPAIRED,
        lambda tool, error: each(lambda n: read_between(tool, error, n), 30),
    ),
    "reworded searches find nothing": cross(
        ["web_search", "grep", "find_file", "mcp__docs__search", "query_db", "lookup_order"],
        EMPTY,
        lambda tool, result: each(
            lambda n: call(tool, result, n, query=f"invoice {' of acme' * (n % 4)} {n}"),
            LOOP_TURNS,
        ),
    ),
    # Each action has another result in every third round.
    "a circle whose results vary": cross(
        _TOOLS,
        ["ls", "view", "http_get", "run", "ask"],
        lambda one, other: each(
            lambda n: call(
                [one, other, "status"][n % 3],
                f"page {n}" if (n + n // 3) % 3 == 1 else f"nothing for {n % 3}",
                n,
                path="all",
            ),
            LOOP_TURNS,
        ),
    ),
    "a circle with one new step in eight": cross(_TOOLS, "12345", wander),
    "the same change, and the file grows": cross(
        ["edit", "insert", "str_replace", "append_file", "apply_patch", "mcp__disk__write_text"],
        ["import os", "# a comment", "return None", "x = 1", "pass"],
        lambda tool, text: each(
            lambda n: call(tool, f"The file has {n} lines.", n, insert=f"{text}\n" * 12),
            LOOP_TURNS,
        ),
    ),
}
