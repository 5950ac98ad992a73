from __future__ import annotations

import os

import pytest

from kvmesh.engine.host_memory import HostMemory


def test_spare_blocks_are_behind_the_others_and_nobody_is_given_them() -> None:
    memory = HostMemory(4, 24, num_spare=2)
    assert memory.num_blocks == 4
    assert memory.view.nbytes == os.fstat(memory.fd).st_size == 6 * 24
    memory.write_view(3, 1)[:] = b"x" * 24
    assert bytes(memory.view) == bytes(3 * 24) + b"x" * 24 + bytes(2 * 24)
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory.fd)
    memory.close()
