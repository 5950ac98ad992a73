"""When the KV of a prompt leaves."""

import pytest

from kvmesh.core.types import WorkerId
from kvmesh.policy.link import LinkView
from kvmesh.policy.transfer_mode import TransferMode, TransferTask, choose_transfer_mode

SLOW = LinkView(WorkerId("d"), "tcp", goodput_bytes_s=1e8)
FAST = LinkView(WorkerId("d"), "shm", goodput_bytes_s=1e11)


@pytest.mark.parametrize(
    ("num_bytes", "num_chunks", "link", "mode"),
    [
        (1 << 30, 1, SLOW, TransferMode.WHOLE),
        (1 << 30, 4, None, TransferMode.CHUNKED),
        (1 << 30, 4, LinkView(WorkerId("d"), "tcp"), TransferMode.CHUNKED),
        (1 << 26, 4, SLOW, TransferMode.CHUNKED),
        (1 << 26, 4, FAST, TransferMode.WHOLE),
        (1 << 30, 4, FAST, TransferMode.CHUNKED),
    ],
)
def test_choice(num_bytes: int, num_chunks: int, link: LinkView | None, mode: TransferMode) -> None:
    decision = choose_transfer_mode(TransferTask(num_bytes, num_chunks), link)

    assert decision.mode is mode
    assert decision.reason


def test_a_queue_on_the_link_makes_chunks_worth_it() -> None:
    task = TransferTask(num_bytes=1 << 20, num_chunks=2)
    idle = LinkView(WorkerId("d"), "tcp", goodput_bytes_s=1e9)
    busy = LinkView(WorkerId("d"), "tcp", goodput_bytes_s=1e9, queued_bytes=1 << 24)

    assert choose_transfer_mode(task, idle).mode is TransferMode.WHOLE
    assert choose_transfer_mode(task, busy).mode is TransferMode.CHUNKED


@pytest.mark.parametrize(
    ("last_bytes", "link", "mode"),
    [
        (1 << 26, SLOW, TransferMode.LAYERED),
        (1 << 20, SLOW, TransferMode.CHUNKED),
        (1 << 26, FAST, TransferMode.CHUNKED),
        (1 << 26, None, TransferMode.CHUNKED),
    ],
)
def test_layers_are_for_a_long_last_chunk(
    last_bytes: int, link: LinkView | None, mode: TransferMode
) -> None:
    task = TransferTask(1 << 30, 16, last_bytes)

    assert choose_transfer_mode(task, link).mode is mode


def test_one_long_chunk_leaves_by_layers() -> None:
    task = TransferTask(1 << 28, 1, 1 << 28)

    assert choose_transfer_mode(task, SLOW).mode is TransferMode.LAYERED
