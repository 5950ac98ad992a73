"""A gateway without one of its shortcuts, for the rows of `benchmarks.gateway_ablation`.

    python -m benchmarks.gateway_without NAME [flags of the gateway]

The product has no switch for them: here the function that takes the shortcut is put out of use
before the gateway starts.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def _without_direct_http() -> None:
    from services.gateway.fronts import http_direct  # noqa: PLC0415

    direct: Any = http_direct.DirectHttp
    direct.wrap = lambda _, factory: factory


def _without_event_template() -> None:
    from services.gateway.api.responses import Responses  # noqa: PLC0415

    responses: Any = Responses
    responses.is_answer = lambda *_: False


def _without_joined_writes() -> None:
    from services.gateway.fronts import joined_writer  # noqa: PLC0415

    writer: Any = joined_writer.JoinedWriter
    writer.write = writer.write_now


def _without_joined_tokens() -> None:
    from services.gateway.wire import worker_sessions  # noqa: PLC0415

    link: Any = worker_sessions.Link
    link._waits = lambda *_: False


def _without_plain_delivery() -> None:
    from services.gateway.request import delivery  # noqa: PLC0415

    made: Any = delivery.Delivery
    plain = made.__init__

    def general(self: Any, *arguments: Any) -> None:
        plain(self, *arguments)
        self._is_plain = False

    made.__init__ = general


def _without_whole_tokens() -> None:
    from services.gateway.text import tokenizer  # noqa: PLC0415

    made: Any = tokenizer.TextTokenizer
    plain = made.__init__

    def decodes(self: Any, *arguments: Any, **named: Any) -> None:
        plain(self, *arguments, **named)
        self.whole = None

    made.__init__ = decodes


def _without_fastokens() -> None:
    from services.gateway.text import text_encoder  # noqa: PLC0415

    async def stays(self: Any, _: Any) -> None:
        self.reason = "left out"

    encoder: Any = text_encoder.TextEncoder
    encoder.speed_up = stays


def _without_batched_metrics() -> None:
    from kvmesh.telemetry import batch_histogram  # noqa: PLC0415
    from services.gateway.request import record  # noqa: PLC0415

    batch_histogram.GATHERED = 1
    record.FLUSH_AFTER = 1


def _without_direct_sockets() -> None:
    from kvmesh.rpc import stream  # noqa: PLC0415

    async def stays(*_: Any) -> None:
        return None

    peer: Any = stream.PeerStream
    peer._go_direct = stays


@dataclass(frozen=True, slots=True)
class Shortcut:
    """One that can be left out.

    Attributes:
        what: it does.
        leave_out: puts it out of use in this process.
    """

    what: str
    leave_out: Callable[[], None]


SHORTCUTS: Mapping[str, Shortcut] = {
    "direct-http": Shortcut("plain requests past aiohttp", _without_direct_http),
    "fastokens": Shortcut("prompts encoded by fastokens", _without_fastokens),
    "direct-sockets": Shortcut("messages on sockets beside gRPC", _without_direct_sockets),
    "joined-tokens": Shortcut("tokens of one turn of the loop joined", _without_joined_tokens),
    "whole-tokens": Shortcut("texts of whole tokens past the decoder", _without_whole_tokens),
    "plain-delivery": Shortcut("tokens without stop strings straight on", _without_plain_delivery),
    "event-template": Shortcut("events with only the text put in", _without_event_template),
    "joined-writes": Shortcut("one write per turn of the loop", _without_joined_writes),
    "batched-metrics": Shortcut("observations sorted together", _without_batched_metrics),
}


if __name__ == "__main__":
    name = sys.argv.pop(1)
    SHORTCUTS[name].leave_out()
    runpy.run_module("services.gateway", run_name="__main__", alter_sys=True)
