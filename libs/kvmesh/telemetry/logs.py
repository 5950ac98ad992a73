"""Structured logs: one event name plus fields per line, request and trace ids among them.

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
        """Whether `info` writes anything; for what is costly to say and said for every request."""
        return self._logger.isEnabledFor(logging.INFO)

    def debug(self, event: str, /, **fields: Any) -> None:
        """Detail for developers."""
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        """Something normal that an operator may look for."""
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        """Something that the mesh survives but should not be usual."""
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        """Something an operator has to act on."""
        self._emit(logging.ERROR, event, fields)

    def failure(self, event: str, error: BaseException, /, **fields: Any) -> None:
        """An unexpected error with its traceback."""
        if self._logger.isEnabledFor(logging.ERROR):
            self._logger.error(event, extra={"fields": fields}, exc_info=error)

    def _emit(self, level: int, event: str, fields: dict[str, Any]) -> None:
        logger = self._logger
        if logger.isEnabledFor(level):
            # `Logger.log` would walk the stack for a line number that no format here shows.
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
    """The time of a line without its milliseconds, made once a second."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, and those that end lines or turn the direction of writing."""


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
        # What others sent may be in a field: it must not end the line, or speak to the terminal.
        text = _UNPRINTABLE.sub(_escaped, text)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text.rstrip()


def unsent_is_detail(record: logging.LogRecord) -> bool:
    """Filter of gRPC's own logger: a status that found its peer gone is a detail, not an error.

    gRPC knows that a peer closed only once its loop has read so; what it sends just before
    fails, and it logs that as an error with a traceback. The peer's leaving itself is told by
    whoever serves the stream.
    """
    kind = record.exc_info[0] if record.exc_info else None
    if kind is not None and kind.__name__ == "ExecuteBatchError":
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        return logging.getLogger().isEnabledFor(logging.DEBUG)
    return True


def unreadable_is_detail(record: logging.LogRecord) -> bool:
    """Filter of aiohttp's server logger: a request that cannot be read is a detail, not an error.

    Anybody can send one; and its traceback quotes the line that could not be read, which may hold a
    key. What it was is left, where it came from too.
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
"""The format for who reads: text for people at a terminal, JSON elsewhere."""

_chosen = AUTO


def logs_for_people() -> bool:
    """Whether logs go to somebody at a terminal, who did not ask for another format."""
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
    # No format shows them, and every record would carry them.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])
    logging.getLogger("grpc._cython.cygrpc").addFilter(unsent_is_detail)
    logging.getLogger("aiohttp.server").addFilter(unreadable_is_detail)


def set_level(level: str) -> bool:
    """Changes how much this process logs; False if there is no such level."""
    if level not in _LEVELS:
        return False
    logging.getLogger().setLevel(_LEVELS[level])
    return True
