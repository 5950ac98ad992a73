"""Watches what a device would have to wait for: tensors made of lists, copies between devices."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class NoCopiesFromTheHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses tensors made of lists, and copies between devices."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        assert not name.startswith(("aten.lift_fresh", "aten.pin_memory", "aten.to.device"))
        if name.startswith("aten._to_copy"):
            assert "device" not in (kwargs or {})
        return func(*args, **(kwargs or {}))


def no_copies() -> AbstractContextManager[object]:
    """Within it, whoever makes a tensor of the host's numbers fails."""
    mode: AbstractContextManager[object] = NoCopiesFromTheHost()  # type: ignore[no-untyped-call]
    return mode
