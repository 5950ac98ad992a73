from __future__ import annotations

import importlib
import json
import logging

import pytest
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from kvmesh.core.errors import ConfigError
from kvmesh.telemetry.logs import (
    EventLogger,
    JsonFormatter,
    TextFormatter,
    configure_logging,
    unreadable_is_detail,
    unsent_is_detail,
)

ExecuteBatchError = importlib.import_module("grpc._cython.cygrpc").ExecuteBatchError


def _record(formatter: logging.Formatter, **fields: object) -> str:
    lines: list[str] = []

    class Catch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(formatter.format(record))

    logger = logging.Logger("test")
    logger.addHandler(Catch())
    EventLogger(logger).warning("rejected", **fields)
    return lines[0]


def test_json_line_holds_event_and_fields() -> None:
    line = json.loads(_record(JsonFormatter("prefill"), request_id="r1", reason="busy"))
    assert line["event"] == "rejected"
    assert line["level"] == "warning"
    assert line["service"] == "prefill"
    assert (line["request_id"], line["reason"]) == ("r1", "busy")


def test_text_line_is_for_people() -> None:
    text = _record(TextFormatter("prefill"), request_id="r1")
    assert "WARNING" in text
    assert text.endswith("rejected request_id=r1")


@pytest.mark.parametrize("make", [JsonFormatter, TextFormatter])
@pytest.mark.parametrize("odd", ["\n", "\r", "\x1b[2J", "\x9b2J", "\u2028", "\u202e", "\0", "\x7f"])
def test_what_others_sent_neither_ends_a_line_nor_speaks_to_the_terminal(
    make: type[JsonFormatter | TextFormatter], odd: str
) -> None:
    text = _record(make("prefill"), error=f"no model {odd}12:00 ERROR gateway forged")
    assert odd not in text
    assert text.splitlines() == [text]
    assert "forged" in text


def test_a_line_has_the_time_it_was_logged() -> None:
    def at(created: float) -> str:
        record = logging.LogRecord("x", logging.INFO, "", 0, "event", None, None)
        record.created, record.msecs = created, created % 1 * 1000
        return str(json.loads(JsonFormatter("prefill").format(record))["time"])

    assert at(0.25) == "1970-01-01T00:00:00.250Z"
    assert at(86_400.5) == "1970-01-02T00:00:00.500Z"
    assert at(0.75) == "1970-01-01T00:00:00.750Z"


def test_what_is_costly_to_say_is_asked_for_first() -> None:
    assert EventLogger(logging.Logger("asked", logging.INFO)).tells_info
    assert not EventLogger(logging.Logger("asked", logging.WARNING)).tells_info


def test_only_grpcs_failed_sends_are_details(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.Logger("grpc")
    logger.addFilter(unsent_is_detail)
    logger.addHandler(caplog.handler)

    def log(error: Exception) -> None:
        try:
            raise error
        except type(error):
            logger.exception("raised by servicer method")

    with caplog.at_level(logging.INFO):
        log(ExecuteBatchError("Failed execute_batch"))
        assert not caplog.records
        log(ValueError("a bug"))
        assert [record.levelname for record in caplog.records] == ["ERROR"]
    with caplog.at_level(logging.DEBUG):
        log(ExecuteBatchError("Failed execute_batch"))
        assert caplog.records[-1].levelname == "DEBUG"


def test_requests_that_cannot_be_read_are_details_without_their_bytes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.Logger("aiohttp.server")
    logger.addFilter(unreadable_is_detail)
    logger.addHandler(caplog.handler)

    def log(error: Exception) -> None:
        logger.error("Error handling request from %s", "1.2.3.4", exc_info=error)

    quoting = BadHttpMessage("Authorization : Bearer key")
    with caplog.at_level(logging.INFO):
        log(quoting)
        log(web.RequestPayloadError("key"))
        assert not caplog.records
        log(ValueError("a bug"))
        assert [record.levelname for record in caplog.records] == ["ERROR"]
    with caplog.at_level(logging.DEBUG):
        log(quoting)
        line = JsonFormatter("gateway").format(caplog.records[-1])
        assert json.loads(line)["error"] == "BadHttpMessage"
        assert "key" not in line


@pytest.mark.parametrize(
    ("words", "option"), [(("loud", "json"), "level"), (("info", "yaml"), "format")]
)
def test_words_that_no_log_knows_are_named(words: tuple[str, str], option: str) -> None:
    with pytest.raises(ConfigError, match=rf"telemetry\.log\.{option} must be"):
        configure_logging("test", *words)
