"""Structured logs: one event name plus fields per line, including request and trace ids.

`log = event_logger(__name__)`; `log.info("prefill_rejected", request_id=..., reason=...)`.
Tests: tests/unit/telemetry/test_logs.py.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from functools import lru_cache
from typing import Any

from kvmesh.core.errors import ConfigError

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class EventLogger:
    """A logger whose messages are event names with fields."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    @property
    def tells_info(self) -> bool:
        """Whether `info` writes anything; checked before expensive events of every request."""
        return self._logger.isEnabledFor(logging.INFO)

    def debug(self, event: str, /, **fields: Any) -> None:
        """Logs a detail for developers."""
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        """Logs a normal event that an operator may look for."""
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        """Logs an event that the mesh survives but that should be rare."""
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        """Logs an event on which an operator has to act."""
        self._emit(logging.ERROR, event, fields)

    def failure(self, event: str, error: BaseException, /, **fields: Any) -> None:
        """Logs an unexpected error with its traceback."""
        if self._logger.isEnabledFor(logging.ERROR):
            self._logger.error(event, extra={"fields": fields}, exc_info=error)

    def _emit(self, level: int, event: str, fields: dict[str, Any]) -> None:
        logger = self._logger
        if logger.isEnabledFor(level):
            # `Logger.log` would search the stack for a line number that no format here shows.
            record = logging.LogRecord(logger.name, level, "", 0, event, None, None)
            record.fields = fields
            logger.handle(record)


def event_logger(name: str) -> EventLogger:
    """The event logger of a module."""
    return EventLogger(logging.getLogger(name))


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Renders the record."""
        line: dict[str, Any] = {
            "time": f"{_utc(int(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _to_json(line)


_to_json = json.JSONEncoder(default=str).encode


@lru_cache(maxsize=1)
def _utc(second: int) -> str:
    """The time of a line without its milliseconds; cached for one second."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, including those that end lines or change the direction of writing."""


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


class TextFormatter(logging.Formatter):
    """`time level service event field=value`, for people at a terminal."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Renders the record."""
        fields = " ".join(f"{k}={v}" for k, v in getattr(record, "fields", {}).items())
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{stamp} {record.levelname:<7} {self._service:<10} {record.getMessage()} {fields}"
        # A field may hold text from outside, which must not end the line or control the terminal.
        text = _UNPRINTABLE.sub(_escaped, text)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text.rstrip()


def unsent_is_detail(record: logging.LogRecord) -> bool:
    """Filter of gRPC's own logger: a failed send to a peer that left is a detail, not an error.

    gRPC knows that a peer closed only after its loop has read that. A send just before fails, and
    gRPC logs it as an error with a traceback. The owner of the stream reports the peer's leaving
    itself.
    """
    kind = record.exc_info[0] if record.exc_info else None
    if kind is not None and kind.__name__ == "ExecuteBatchError":
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        return logging.getLogger().isEnabledFor(logging.DEBUG)
    return True


def unreadable_is_detail(record: logging.LogRecord) -> bool:
    """Filter of aiohttp's server logger: an unreadable request is a detail, not an error.

    Anybody can send one. Its traceback quotes the unreadable line, which may hold a key. The log
    keeps the kind of error and the sender.
    """
    kind = record.exc_info[0] if record.exc_info else None
    if kind is None or _UNREADABLE.isdisjoint(each.__name__ for each in kind.__mro__):
        return True
    record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    record.fields = {"error": kind.__name__}
    record.exc_info = record.exc_text = None
    return logging.getLogger().isEnabledFor(logging.DEBUG)


_UNREADABLE = frozenset({"HttpProcessingError", "RequestPayloadError"})


AUTO = "auto"
"""The format that depends on the reader: text for people at a terminal, else JSON."""

_chosen = AUTO


def logs_for_people() -> bool:
    """Whether logs go to a person at a terminal who did not choose another format."""
    return _chosen == AUTO and sys.stderr.isatty()


def configure_logging(service: str, level: str = "info", fmt: str = AUTO) -> None:
    """Sends all logs of this process to standard error in one format.

    Args:
        service: name that goes into every line.
        level: debug, info, warning or error.
        fmt: json, text or auto.

    Raises:
        ConfigError: another word.
    """
    if level not in _LEVELS:
        raise ConfigError(f"telemetry.log.level must be one of {', '.join(_LEVELS)}, got {level!r}")
    if fmt not in {"json", "text", AUTO}:
        raise ConfigError(f"telemetry.log.format must be json, text or auto, got {fmt!r}")
    global _chosen  # noqa: PLW0603 - as the root logger, which this sets, is one of the process
    _chosen = fmt
    is_text = fmt == "text" or logs_for_people()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter(service) if is_text else JsonFormatter(service))
    # No format shows these, and every record would carry them.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])
    logging.getLogger("grpc._cython.cygrpc").addFilter(unsent_is_detail)
    logging.getLogger("aiohttp.server").addFilter(unreadable_is_detail)


def set_level(level: str) -> bool:
    """Changes the log level of this process. Returns False if there is no such level."""
    if level not in _LEVELS:
        return False
    logging.getLogger().setLevel(_LEVELS[level])
    return True
