from __future__ import annotations

import gc
import mmap
import os

import pytest
import torch

from kvmesh.core.kv_formats import DTYPE_BYTES
from kvmesh.core.types import KvLayout
from kvmesh.engine.kv_cache import TORCH_DTYPES, HostKvPool, allocate_pool


def layout(dtype: str = "float32") -> KvLayout:
    return KvLayout("f", dtype, block_size=4, num_layers=2, num_kv_heads=3, head_dim=5)


@pytest.mark.parametrize("dtype", list(DTYPE_BYTES))
def test_a_block_is_one_range_of_bytes(dtype: str) -> None:
    pool = allocate_pool(layout(dtype), 6, "cpu")
    assert pool.tensor.shape == (6, 2, 2, 4, 3, 5)
    assert pool.tensor.dtype == TORCH_DTYPES[dtype]
    assert not pool.tensor.any()
    pool.tensor[2:4] = 1.5
    view = pool.read_view(2, 2)
    assert view.nbytes == 2 * layout(dtype).block_bytes
    values = torch.frombuffer(view, dtype=TORCH_DTYPES[dtype])
    assert values.eq(1.5).all()
    assert not any(pool.read_view(1, 1))
    assert not any(pool.read_view(4, 2))
    pool.close()


def test_received_bytes_lie_where_the_model_reads() -> None:
    source, target = HostKvPool(layout(), 3), HostKvPool(layout(), 3)
    source.tensor.normal_()
    target.write_view(0, 2)[:] = source.read_view(1, 2)
    target.written(0, 2)
    assert torch.equal(target.tensor[:2], source.tensor[1:])
    source.close()
    target.close()


def test_the_descriptor_maps_the_same_memory() -> None:
    pool = HostKvPool(layout(), 2)
    pool.tensor[1] = 7.0
    size = layout().block_bytes
    with mmap.mmap(pool.fd, 2 * size) as other:
        assert other[size:] == bytes(pool.read_view(1, 1))
    pool.close()


def test_close_is_repeatable_and_leaves_views_alone() -> None:
    pool = HostKvPool(layout(), 2)
    pool.tensor[0] = 3.0
    view = pool.read_view(0, 1)
    before = bytes(view)
    pool.close()
    pool.close()
    assert bytes(view) == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pool.fd)


def test_a_pool_that_is_forgotten_keeps_no_descriptor() -> None:
    pool = HostKvPool(layout(), 3)
    place = f"/proc/self/fd/{pool.fd}"
    assert "kvmesh-kv" in os.readlink(place)
    del pool
    gc.collect()
    assert not os.path.lexists(place) or "kvmesh-kv" not in os.readlink(place)


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (1, 2), (2, 1)])
def test_runs_outside_the_pool_are_our_bug(first: int, count: int) -> None:
    pool = HostKvPool(layout(), 2)
    with pytest.raises(AssertionError):
        pool.read_view(first, count)
    pool.close()
