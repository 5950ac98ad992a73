from __future__ import annotations

import json
import logging

from kvmesh.telemetry.logs import EventLogger, JsonFormatter, TextFormatter


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
