"""How a transfer is shared among the connections of a TCP channel."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from kvmesh.core.errors import LostError
from kvmesh.core.types import Endpoint
from kvmesh.transfer.greeting import LaneOptions, Link, PeerKey
from kvmesh.transfer.lane import (
    Lane,
)
from kvmesh.transfer.meters import LinkMeter
from kvmesh.transfer.tcp_channel import (
    MAX_PIECE_BYTES,
    MIN_PIECE_BYTES,
    TcpChannel,
    TcpOptions,
    even_blocks,
)
from tests.transfer_pair import BLOCK, DECODE, SENDER, SourcePool

MIB = 1 << 20


@pytest.mark.parametrize(
    ("mib", "lanes", "most_mib", "pieces"),
    [
        (1, 2, 16, [1]),  # not worth a second connection
        (3, 2, 16, [1.5, 1.5]),
        (16, 1, 16, [16]),
        (16, 2, 16, [8, 8]),
        (16, 4, 16, [4] * 4),
        (40, 2, 16, [10] * 4),  # not 16, 16 and 8: the one that gets none of it would wait
        (40, 2, 4, [4] * 10),
        (2, 4, 0.25, [0.25] * 8),  # staging memory is short
    ],
)
def test_connections_get_equal_shares(
    mib: int, lanes: int, most_mib: float, pieces: list[float]
) -> None:
    block = 16 << 10
    num_blocks = mib * MIB // block
    size = even_blocks(num_blocks, block, lanes, int(most_mib * MIB))
    left = [min(size, num_blocks - start) for start in range(0, num_blocks, size)]
    assert left == [round(piece * MIB / block) for piece in pieces]


@pytest.mark.parametrize("num_blocks", [1, 63, 64, 65, 1025, 4999])
@pytest.mark.parametrize("block", [4096, 100_000, 3 * MIB, 20 * MIB])
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_no_share_is_too_large_or_too_small(num_blocks: int, block: int, lanes: int) -> None:
    size = even_blocks(num_blocks, block, lanes, MAX_PIECE_BYTES)
    assert size == 1 or size * block <= MAX_PIECE_BYTES
    assert (size + 1) * block > MIN_PIECE_BYTES


@pytest.mark.parametrize("others", [0, BLOCK])
async def test_a_lost_connection_is_made_again_before_another_is_used(others: int) -> None:
    """Its successor's greeting ends what the receiver still has of it."""
    lanes = [SimpleNamespace(is_open=index != 1, unanswered_bytes=others) for index in range(3)]
    options = TcpOptions(LaneOptions(1.0, 1.0), lanes=len(lanes))
    source = SourcePool(1)
    with ThreadPoolExecutor(1) as threads:
        link = Link(SENDER, PeerKey(DECODE, 7), 7, LinkMeter(), threads)
        channel = TcpChannel(link, Endpoint("localhost", 1), options, source)
        channel._lanes[:] = lanes  # type: ignore[assignment]
        made: list[int] = []

        async def make(index: int) -> Lane:
            made.append(index)
            raise LostError("not now")

        channel._lane = make  # type: ignore[method-assign]
        assert await channel._any_lane(3) is lanes[0]  # type: ignore[comparison-overlap]
        assert made == [1]
    source.close()
