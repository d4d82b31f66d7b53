"""The parts of `envoy-config --snippet`, added to a configuration without Loopguard, on Envoy."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.cli.envoy_config.options import EnvoyOptions
from extproc.cli.envoy_config.snippet import render_snippet
from extproc.cli.main import main
from extproc.options import read_options
from extproc.settings import Settings
from tests.support.documents import bare_policy, bundle, policy
from tests.support.envoy_config import (
    SAMPLE,
    UPSTREAM,
    bootstrap,
    choose_late,
    find_places,
    loaded,
    theirs,
)
from tests.support.harness import Stack, envoy_version, eventually, stack
from tests.support.looping import looping
from tests.support.streams import over_http2

POLICIES = bundle(
    policy(
        "chat",
        {"pathPrefix": "/chat"},
        action="warn",
        threshold_identical_requests=2,
        escalate={"reject": 3},
    ),
    policy("files", {"pathPrefix": "/files"}),
)
NAMED = ("--routes", "chat,files")
TOLERANT = ("--tolerant-routes", "files", "--buffer-limit", "100000")
LARGE = 3_000_000

needs_content_length = pytest.mark.skipif(
    envoy_version() < (1, 38),
    reason="allow_content_length_header is not in this Envoy: tolerant routes are NOT tested",
)

tells_413 = pytest.mark.skipif(
    envoy_version() < (1, 38),
    reason="this Envoy does not say that it has refused a body: NOT tested",
)


def read_parts(snippet: str) -> Iterator[tuple[str, str, Any]]:
    """Place, words and contents of each document."""
    for document in snippet.split("---\n")[1:]:
        found = re.match(r"# \d+\. (\S+): (.*(?:\n#    .*)*)\n", document)
        assert found is not None, document
        yield found[1], found[2], yaml.safe_load(document)


def follow(snippet: str, configuration: dict[str, Any]) -> dict[str, Any]:
    """Put each part where it says that it belongs."""
    for path, words, part in read_parts(snippet):
        if "access_log" in path:
            continue
        if isinstance(part, list):
            (place,) = find_places(configuration, path)
            place[:0] = part
            continue
        above, of_routes, below = path.partition("routes[]")
        for place in find_places(configuration, above + of_routes):
            if not of_routes or place["name"] in words.removeprefix("the routes named ").split(
                ", "
            ):
                (place[below.removeprefix(".")] if below else place).update(part)
    return configuration


def attach(*flags: str) -> Callable[[str], str]:
    """What an operator who follows the snippet does, for `stack`."""

    def edit(text: str) -> str:
        printed = yaml.safe_load(text)
        address = printed["static_resources"]["clusters"][0]["load_assignment"]["endpoints"][0][
            "lb_endpoints"
        ][0]["endpoint"]
        endpoint = f"unix:{address['address']['pipe']['path']}"
        return json.dumps(follow(print_snippet(*flags, "--endpoints", endpoint), theirs(printed)))

    return edit


def print_snippet(*flags: str, document: object = POLICIES) -> str:
    pairs = zip(flags[::2], flags[1::2], strict=True)
    given = {flag.removeprefix("--").replace("-", "_"): value for flag, value in pairs}
    return render_snippet(loaded(document), read_options(EnvoyOptions, {"snippet": True, **given}))


def send(made: Stack, path: str, size: int, times: int = 3) -> list[int]:
    """Statuses of equal uploads; 0 where Envoy closed the connection before the end of the body."""
    found = []
    for _ in range(times):
        found.append(0)
        with suppress(OSError):
            found[-1] = made.send(path, method="POST", body=b"x" * size).status
    return found


def test_envoy_with_the_snippet_refuses_loops_and_takes_uploads() -> None:
    with stack(POLICIES, edit=attach(*NAMED)) as made:
        made.post("/chat/a", b"same")
        second = made.post("/chat/a", b"same")
        small = send(made, "/chat/a", 4)
        large = send(made, "/chat/b", LARGE)
        rest = send(made, "/rest", 2 * 10_485_760)
        spelt = made.post("//files/../chat/a", b"same").status
        made.send("/chat/c", headers={"x-fairvisor-warning": "forged"})

    assert second.headers["x-fairvisor-warning"] == "loop_warn"
    assert small == large == [200, 200, 429]
    assert (rest, spelt) == ([200] * 3, 429)
    assert made.upstream.seen[-1].header("x-fairvisor-warning") is None


@tells_413
@pytest.mark.parametrize("transport", ["fast", "grpcio"])
def test_refused_upload_is_counted_apart_from_an_aborted_one(transport: str) -> None:
    with stack(POLICIES, "--transport", transport, buffer_limit=65_535) as made:
        for body in (b"x" * 100_000, iter([b"x" * 50_000] * 2)):
            with suppress(OSError):
                made.send("/chat", method="POST", body=body)
        with made.connect() as leaving:
            leaving.sendall(b"POST /chat HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\nx")
            eventually(
                lambda: made.loopguard.metric("streams_in_flight") == 1, "the upload's stream"
            )
        eventually(
            lambda: made.loopguard.metric("uncounted_total", reason="aborted") == 1,
            "the one who left",
        )

        assert made.loopguard.metric("uncounted_total", reason="too_large") == 2
        assert made.envoy.stat("http.ingress.ext_proc.loopguard.failure_mode_allowed") == 0


@needs_content_length
def test_snippet_serves_strict_and_tolerant_routes_on_one_listener() -> None:
    with stack(POLICIES, buffer_limit=100_000, edit=attach(*NAMED, *TOLERANT)) as made:
        small = [send(made, path, 1_000, 4) for path in ("/chat", "/files")]
        large = [send(made, path, LARGE) for path in ("/files/large", "/chat")]
        received = made.upstream.seen[-1]
        eventually(
            lambda: (
                made.loopguard.metric("uncounted_total", policy="chat", reason="too_large") == 3
            ),
            "three refusals",
        )

        assert (
            made.loopguard.metric("uncounted_total", policy="files", reason="body_truncated") == 3
        )

    assert (small, large[0]) == ([[200, 200, 429, 429]] * 2, [200] * 3)
    assert set(large[1]) <= {0, 413}
    assert (received.target, received.header("content-length"), len(received.body)) == (
        "/files/large",
        str(LARGE),
        LARGE,
    )


@pytest.mark.parametrize(
    ("edit", "acts"), [(attach(*NAMED), True), (str, False)], ids=["snippet", "observing bootstrap"]
)
def test_route_chosen_late_by_a_filter_is_guarded(edit: Callable[[str], str], acts: bool) -> None:
    """A request that ends on another route opens no stream."""

    def count_streams() -> list[str]:
        return re.findall(
            r"^http\.\w+\.ext_proc\.loopguard\.streams_started: (\d+)$",
            made.envoy.admin("/stats"),
            re.MULTILINE,
        )

    flags: dict[str, Any] = {} if acts else {"shadow_mode": "observability"}
    with stack(POLICIES, edit=lambda text: choose_late(edit(text)), **flags) as made:
        # Envoy 1.38 may cut an observer off behind a large body
        late = send(made, "/late/files", LARGE if acts else 1_000)
        eventually(
            lambda: made.loopguard.metric("requests_total", policy="files") == 3, "three decisions"
        )
        asked = count_streams()
        found = send(made, "/rest", 20_000_000)
        received = made.upstream.seen[-1]
        left = send(made, "/late/rest", 4)
        asked_then = count_streams()

    assert late == [200, 200, 429 if acts else 200]
    assert asked == asked_then == ["3"]
    assert (found, left, len(received.body)) == ([200] * 3, [200] * 3, 20_000_000)


def test_only_guarded_uploads_have_the_snippets_time_limits() -> None:
    follows = attach(*NAMED)
    bound = re.compile(r'"(request_timeout|idle_timeout)": "\d+s"')

    def slowly() -> Iterator[bytes]:
        for _ in range(10):
            yield b"x"
            time.sleep(0.2)

    with stack(POLICIES, edit=lambda text: bound.sub(r'"\1": "1.500s"', follows(text))) as made:
        slow = made.send("/rest", method="POST", body=slowly())
        with made.connect() as stalls:
            stalls.sendall(b"POST /chat HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\nx")
            ended = stalls.makefile("rb").readline()

    assert (slow.status, made.upstream.seen[-1].body) == (200, b"x" * 10)
    assert ended == b"HTTP/1.1 408 Request Timeout\r\n"


@needs_content_length
def test_bootstrap_with_tolerant_routes_counts_trailers_and_steers() -> None:
    steer = policy("chat", {"pathPrefix": "/v1/"}, similarity="turns", action="steer")
    with stack(
        bundle(steer, policy("files", {"pathPrefix": "/files"})), tolerant_routes=["/files"]
    ) as made:
        answers = [over_http2(made, "/files", {}, trailers=True) for _ in range(3)]
        status = made.send("/v1/chat", method="POST", body=looping(3)).status
        received = made.upstream.seen[-1]

    assert ([status for status, _ in answers], status) == (["200", "200", "429"], 200)
    assert received.header("content-length") == str(len(received.body))
    assert len(received.body) > len(looping(3))


# ---- The printed snippet


def test_snippet_parts_equal_those_of_a_bootstrap() -> None:
    whole = yaml.safe_load(bootstrap(POLICIES, tolerant_routes=["/files"]))

    for path, _, part in read_parts(print_snippet("--tolerant-routes", "/files")):
        if path.endswith(".route"):
            continue  # a whole bootstrap bounds uploads on all of its routes at once
        places = list(find_places(whole, path))
        if isinstance(part, list):
            assert part[0] in places[0]
        else:
            assert any(part.items() <= place.items() for place in places)


LIMITS = {"max_cost_per_session": 1, "unknown_model": {"input": 1, "output": 1}}
COSTS = bundle(
    bare_policy("agents", "/v1/", limit_keys=["header:x-user-id"], session_limits=LIMITS)
)


GUARD = ("route_config", "virtual_hosts[]", "routes[]", "route")


@pytest.mark.parametrize(
    ("document", "flags", "expected"),
    [
        (
            POLICIES,
            ["--tolerant-routes", "/files"],
            [
                "listeners[]",
                "typed_config",
                "json_format",
                "http_filters",
                *GUARD,
                "routes[]",
                "route",
                "clusters",
            ],
        ),
        (
            POLICIES,
            ["--shadow-mode", "observability"],
            ["typed_config", "http_filters", "route_config", "routes[]", "clusters"],
        ),
        (
            COSTS,
            [],
            [
                "listeners[]",
                "typed_config",
                "access_log",
                "json_format",
                "http_filters",
                "http_filters",
                *GUARD,
                "clusters",
            ],
        ),
    ],
    ids=["tolerant", "looking on", "what answers cost"],
)
def test_snippet_has_only_the_parts_its_policies_need(
    document: object, flags: list[str], expected: list[str]
) -> None:
    parts = list(read_parts(print_snippet(*flags, document=document)))

    assert [path.rpartition(".")[2] for path, _, _ in parts] == expected
    if document is COSTS:
        (route,) = [part for path, _, part in parts if path.endswith("routes[]")]
        assert list(route["typed_per_filter_config"]) == ["envoy.filters.http.ext_proc"]
        assert route["request_headers_to_remove"] == ["accept-encoding"]
    elif "/files" in flags:
        assert [words for path, words, _ in parts if path.endswith("routes[]")] == [
            "every route for one of these paths\n#    /chat and below, for chat",
            "every route for one of these paths\n#    /files and below, for files",
        ]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "envoy-config needs --upstream HOST:PORT, or --snippet"),
        (["--upstream", "a:1", "--routes", "a"], "--routes must be left out without --snippet"),
        (["--snippet", "--listen", "127.0.0.1:1"], "--listen must be left out with --snippet"),
        (["--snippet", "--otlp", "127.0.0.1:4317"], "--otlp must be left out with --snippet"),
        (["--upstream", "h:80", "--otlp", "unix:/x"], "must be HOST:PORT, such as 127.0.0.1:4317"),
        (
            ["--upstream", "h:80", "--shadow-mode", "observability", "--trace-tags"],
            "--trace-tags must be left out where",
        ),
        (["--snippet", "--upstream", "a:1"], "--upstream must be left out with --snippet"),
        (
            ["--snippet", "--routes", "a,,b"],
            "--routes must be names, separated by commas, not 'a,,b'",
        ),
        (
            ["--snippet", "--routes", "a", "--tolerant-routes", "b"],
            "'b' is not a guarded route; the guarded routes are a",
        ),
        (
            ["--upstream", "a:1", "--tolerant-routes", "/x"],
            "'/x' is not a guarded route; the guarded routes are /v1/chat/completions",
        ),
        (
            ["--snippet", "--body-mode", "tolerant", "--tolerant-routes", "a"],
            "--tolerant-routes must be left out where --body-mode",
        ),
        (
            ["--snippet", "--shadow-mode", "partial", "--tolerant-routes", "a"],
            "--tolerant-routes must be left out where --shadow-mode",
        ),
    ],
)
def test_contradictory_flags_are_refused_in_one_line(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["envoy-config", "--policy", str(SAMPLE), *flags])

    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert told in printed.err
    assert printed.err.count("\n") == 1


def test_policy_without_a_guarded_route_is_warned_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    selectors: dict[str, Any] = {
        "a": {"routes": ["x", "y"]},
        "b": {"routes": ["z"]},
        "c": {"pathPrefix": "/"},
    }
    file = tmp_path / "policies.json"
    file.write_text(json.dumps([policy(name, selector) for name, selector in selectors.items()]))

    code = main(["envoy-config", "--policy", str(file), "--snippet", "--routes", "y"])

    assert code == 0
    assert (
        capsys.readouterr().err
        == "warning: these policies select by routes that are not in --routes: b\n"
    )


def test_default_ports_differ() -> None:
    options = read_options(EnvoyOptions, {"upstream": UPSTREAM})

    ports = [
        options.listen.port,
        options.admin.port,
        8080,
        Settings().listen.port,
        Settings().admin.port,
    ]

    assert len(set(ports)) == len(ports)
    assert [endpoint.port for endpoint in options.endpoints] == [Settings().listen.port]
