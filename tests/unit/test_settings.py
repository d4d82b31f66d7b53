"""Settings come from a flag, else the environment, else the default."""

import argparse
from dataclasses import fields

import pytest

from extproc.errors import UsageError
from extproc.options import ENVIRONMENT_ONLY
from extproc.settings import (
    Address,
    Settings,
    SubjectName,
    add_flags,
    find_unknown,
    parse_address,
    read_settings,
)


def given(*flags: str, **environment: str) -> Settings:
    """Settings from a command line and `LOOPGUARD_` variables named without their prefix."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return read_settings(
        vars(parser.parse_args(flags)),
        {f"LOOPGUARD_{name}": value for name, value in environment.items()},
    )


# field, a value other than the default as flag and as variable, what becomes of them
EVERY: list[tuple[str, list[str], str, object, object]] = [
    ("policy", ["a:b", "c"], "d:e:", ("a:b", "c"), ("d", "e")),
    ("namespace_of", ["a=id:a-"], "a=id:a- b=id:b-", ("a=id:a-",), ("a=id:a-", "b=id:b-")),
    ("listen", ["unix:/x"], "h:1", Address("unix:/x"), Address("h:1", "h", 1)),
    ("tls_cert", ["/a"], "/b", "/a", "/b"),
    ("tls_key", ["/a"], "/b", "/a", "/b"),
    ("tls_client_ca", ["/a"], "/b", "/a", "/b"),
    (
        "tls_client_san",
        ["a", "b"],
        "10.0.0.1",
        (SubjectName("DNS", "a"), SubjectName("DNS", "b")),
        (SubjectName("IP Address", "10.0.0.1"),),
    ),
    ("allow_plaintext", [], "yes", True, True),
    ("transport", ["grpcio"], "grpcio", "grpcio", "grpcio"),
    ("admin", ["h:2"], "h:1", Address("h:2", "h", 2), Address("h:1", "h", 1)),
    ("admin_token_file", ["/a"], "/b", "/a", "/b"),
    ("admin_socket", ["/a"], "/b", "/a", "/b"),
    ("store", ["x://"], "y://", "x://", "y://"),
    ("store_timeout", ["1"], "0.5", 1.0, 0.5),
    ("store_password_file", ["/a"], "/b", "/a", "/b"),
    ("hash_key_file", ["/a"], "/b", "/a", "/b"),
    ("scope", ["edge"], "sidecar", "edge", "sidecar"),
    ("on_store_error", ["reject"], "reject", "reject", "reject"),
    ("on_bad_file", ["skip"], "skip", "skip", "skip"),
    ("shadow", [], "yes", True, True),
    ("record", [], "1", True, True),
    ("allow_unverified_jwt", [], "TRUE", True, True),
    ("allow_unenforced", [], "on", True, True),
    ("max_streams", ["1"], "2", 1, 2),
    ("max_connections", ["1"], "2", 1, 2),
    ("max_throttled", ["1"], "2", 1, 2),
    ("drain_delay", ["0"], "1.5", 0.0, 1.5),
    ("drain_timeout", ["86400"], "1e2", 86_400.0, 100.0),
    ("log_format", ["json"], "json", "json", "json"),
    ("log_level", ["debug"], "error", "debug", "error"),
    ("show_callers", [], "true", True, True),
    ("show_results", ["80"], "200", 80, 200),
    ("events", ["-"], "/a", "-", "/a"),
    ("events_secret_file", ["/a"], "/b", "/a", "/b"),
    ("events_ca", ["/a"], "/b", "/a", "/b"),
    ("price", ["2.50"], "3", 2.5, 3.0),
]


def test_table_has_every_setting() -> None:
    flags = [item.name for item in fields(Settings) if item.metadata["metavar"] != ENVIRONMENT_ONLY]

    assert [row[0] for row in EVERY] == flags


def test_password_has_no_flag() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)

    assert given(STORE_PASSWORD="secret").store_password == "secret"  # noqa: S106  # made up
    assert "STORE_PASSWORD]" not in parser.format_help()


@pytest.mark.parametrize(("name", "flags", "variable", "by_flag", "by_variable"), EVERY)
def test_flag_overrides_environment_overrides_default(
    name: str, flags: list[str], variable: str, by_flag: object, by_variable: object
) -> None:
    flag = "--" + name.replace("_", "-")
    line = [part for value in flags for part in (flag, value)] or [flag]
    environment = {name.upper(): variable}

    values = [
        getattr(given(*line, **environment), name),
        getattr(given(**environment), name),
        getattr(given(), name),
    ]

    assert values == [by_flag, by_variable, getattr(Settings(), name)]
    assert values[2] not in values[:2]


def test_defaults() -> None:
    settings = given()

    assert (settings.listen.text, settings.admin.text) == ("127.0.0.1:50051", "127.0.0.1:9900")
    assert (settings.store, settings.on_store_error, settings.shadow) == (
        "memory://",
        "allow",
        False,
    )
    assert (settings.max_streams, settings.max_throttled) == (20_000, 10_000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:50051", Address("127.0.0.1:50051", "127.0.0.1", 50051)),
        ("localhost:0", Address("localhost:0", "localhost", 0)),
        (":9900", Address("[::]:9900", "::", 9900)),
        ("[::1]:65535", Address("[::1]:65535", "::1", 65535)),
        ("[fe80::1%eth0]:1", Address("[fe80::1%eth0]:1", "fe80::1%eth0", 1)),
        ("unix:/run/loopguard.sock", Address("unix:/run/loopguard.sock")),
    ],
)
def test_addresses_are_parsed(text: str, expected: Address) -> None:
    found = parse_address(text)

    assert found == expected
    assert found.is_unix == text.startswith("unix:")


NO_ADDRESS = [
    "",
    "50051",
    "host",
    "host:",
    "host:65536",
    "host:-1",
    "host:x",
    "host:\u0663",
    "::1:80",
    "[::1",
    "[::1:80",
    "[::1]",
]
NO_ADDRESS += ["unix:", "unix:relative", "unix:80", "http://h:80", "a b:80", "h:80 ", "h/x:80"]

BAD = [
    *(("listen", text, "must be HOST:PORT or unix:/PATH") for text in NO_ADDRESS),
    ("price", "cheap", "must be US dollars per million input tokens, such as 2.50"),
    ("admin", "9900", "must be HOST:PORT or unix:/PATH"),
    ("on_store_error", "ignore", "must be one of allow, reject"),
    *(
        ("max_streams", text, "must be a positive integer")
        for text in ("0", "-1", "1.5", "many", "")
    ),
    *((name, "0", "must be a positive integer") for name in ("max_connections", "max_throttled")),
    *(
        ("drain_delay", text, "must be a number of seconds from 0 to 86400")
        for text in ("-1", "nan", "inf", "86401", "5s", "")
    ),
    ("drain_timeout", "soon", "must be a number of seconds from 0 to 86400"),
    ("log_format", "xml", "must be one of text, json"),
    ("log_level", "INFO", "must be one of debug, info, warning, error"),
    ("shadow", "maybe", "must be true or false"),
]


@pytest.mark.parametrize(("name", "value", "right"), BAD)
def test_invalid_value_names_its_origin_and_valid_values(name: str, value: str, right: str) -> None:
    flag = "--" + name.replace("_", "-")

    with pytest.raises(UsageError) as by_variable:
        given(**{name.upper(): value})
    assert str(by_variable.value) == f"LOOPGUARD_{name.upper()} {right}, not {value!r}"

    if name != "shadow":  # whose flag has no value
        with pytest.raises(UsageError) as by_flag:
            given(f"{flag}={value}")
        assert str(by_flag.value) == f"{flag} {right}, not {value!r}"


@pytest.mark.parametrize(
    ("flags", "variable", "value"),
    [
        *(([], text, False) for text in ("0", "false", "No", "off", "")),
        ([], "On", True),
        (["--shadow"], "maybe", True),
    ],
)
def test_switches_take_the_usual_words(flags: list[str], variable: str, value: bool) -> None:
    assert given(*flags, SHADOW=variable).shadow is value


def test_unknown_variables_are_named() -> None:
    environ = dict.fromkeys(
        [
            "LOOPGUARD_MAX_STREAM",
            "LOOPGUARD_QQQQ",
            "LOOPGUARD_SHADOW",
            "LOOPGUARD_PORT",
            "LOOPGUARD_PORT_50051_TCP_ADDR",
        ],
        "1",
    )
    environ |= dict.fromkeys(
        ["LOOPGUARD_SERVICE_HOST", "LOOPGUARD_SERVICE_PORT_GRPC", "LOOPGUARD_TEST_ENVOY"], "1"
    )
    environ |= dict.fromkeys(["LOOPGUARD_COMPILED", "PATH"], "1")

    assert find_unknown(environ) == [
        "LOOPGUARD_MAX_STREAM is not a setting; did you mean LOOPGUARD_MAX_STREAMS?",
        "LOOPGUARD_QQQQ is not a setting",
    ]
