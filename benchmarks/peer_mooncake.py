"""Mooncake's transfer engine (TCP) under the load of `benchmarks.transfer`; run by its interpreter.

`python peer_mooncake.py tcp '[[sizes], runs, seed]'` starts the other end itself and prints rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mooncake.engine import TransferEngine
from peer_load import Range, Send, run

_MAX_BATCH = 256


class Mooncake:
    """An engine without a metadata server."""

    def __init__(self, name: str) -> None:
        self._engine = TransferEngine()
        assert self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, name

    def register(self, address: int, num_bytes: int) -> dict[str, Any]:
        """The other end needs the engine's port."""
        assert self._engine.register_memory(address, num_bytes) == 0, "not registered"
        return {"port": self._engine.get_rpc_port()}

    def sender(self, told: dict[str, Any]) -> Send:
        """Writes in batches: a longer one overruns the engine's queue and fails."""
        engine, peer = self._engine, f"127.0.0.1:{told['port']}"

        def send(local: list[Range], remote: list[Range]) -> Callable[[], None]:
            here, there = ([at for at, _ in ranges] for ranges in (local, remote))
            lengths = [length for _, length in local]

            def work() -> None:
                for start in range(0, len(lengths), _MAX_BATCH):
                    part = slice(start, start + _MAX_BATCH)
                    failed = engine.batch_transfer_sync_write(
                        peer, here[part], there[part], lengths[part]
                    )
                    assert not failed, "transfer failed"

            return work

        return send


if __name__ == "__main__":
    run("mooncake", __file__, Mooncake)
