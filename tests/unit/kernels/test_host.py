from __future__ import annotations

import functools
import logging
from pathlib import Path

import pytest
import torch

from kvmesh.core.native_libraries import load_library
from kvmesh.kernels import host, host_library, layer_ops
from kvmesh.kernels.dispatch import HostAttention
from kvmesh.kernels.host_library import load_host_library
from kvmesh.kernels.plan import padded_tables
from tests.native import needs_host_library
from tests.unit.kernels import layer_cases
from tests.unit.kernels.attention_cases import (
    DECODE_CASES,
    LAYER,
    PREFILL_CASES,
    Case,
    Inputs,
    assert_close,
    check_step,
    make_inputs,
)

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@needs_host_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_rows_equal_the_twins(rows: int, dtype: torch.dtype) -> None:
    for has_delta in (False, True):
        layer_cases.check_add_rms_norm(host.add_rms_norm, rows, has_delta, dtype, "cpu")
    layer_cases.check_silu_and_mul(host.silu_and_mul, rows, dtype, "cpu")


@needs_host_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_and_write(has_norm: bool, dtype: torch.dtype) -> None:
    layer_cases.check_rope_and_write(host.rope_and_write, has_norm, 64, dtype, "cpu")


HEAD_DIM_CASES = tuple(
    Case(f"head size {head_dim}, group of {group}", ((40, 1), (2, 1)), 2, group, head_dim)
    for head_dim, group in ((16, 1), (32, 7), (64, 3), (128, 4), (256, 2), (512, 8))
)


@needs_host_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", DECODE_CASES + HEAD_DIM_CASES, ids=str)
def test_decode_attention(case: Case, dtype: torch.dtype) -> None:
    inputs, scale = make_inputs(case, dtype, "cpu"), case.head_dim**-0.5
    if not host.has_attention(inputs.kv):
        assert case.head_dim == 24, "a head size that models have"
        return
    out = host.decode_attention(
        inputs.q,
        inputs.kv,
        LAYER,
        torch.from_numpy(padded_tables(inputs.tables)),
        torch.tensor(inputs.lens),
        scale=scale,
        window=case.window,
        sinks=inputs.sinks,
        cap=inputs.cap,
    )
    assert_close(out, inputs, scale, dtype, case.window)


PROMPT_CASES = (
    Case("several tiles of queries", ((0, 90), (130, 70)), group=4, head_dim=64),
    Case("more tiles of positions than a window", ((150, 60),), group=3, head_dim=32, window=70),
    Case("sinks and late queries", ((64, 40),), group=2, head_dim=256, has_sinks=True),
    Case("wide heads", ((0, 40), (2, 1)), head_dim=128),
    Case("no groups", ((30, 200),), kv_heads=1, group=1, head_dim=32, block_size=5),
)


def attend_prompts(inputs: Inputs, scale: float, window: int) -> torch.Tensor:
    return host.prefill_attention(
        inputs.q,
        inputs.kv,
        LAYER,
        torch.from_numpy(padded_tables(inputs.tables)),
        torch.tensor(inputs.starts),
        torch.tensor(inputs.lens),
        scale=scale,
        window=window,
        sinks=inputs.sinks,
        cap=inputs.cap,
    )


@needs_host_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", PREFILL_CASES + PROMPT_CASES, ids=str)
def test_prefill_attention(case: Case, dtype: torch.dtype) -> None:
    inputs, scale = make_inputs(case, dtype, "cpu"), case.head_dim**-0.5
    if not host.has_attention(inputs.kv):
        assert case.head_dim == 24, "a head size that models have"
        return
    assert_close(attend_prompts(inputs, scale, case.window), inputs, scale, dtype, case.window)


@needs_host_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sink", [100.0, -100.0])
def test_scores_may_rise_and_fall_far(sink: float, dtype: torch.dtype) -> None:
    case = Case("steep", ((0, 150),), head_dim=32)
    inputs = make_inputs(case, dtype, "cpu")
    sinks = torch.full((inputs.q.shape[1],), sink)
    steep = Inputs(inputs.q * 10, inputs.kv, inputs.tables, inputs.lens, inputs.starts, sinks)
    assert_close(attend_prompts(steep, 0.2, 0), steep, 0.2, dtype, 0)


@needs_host_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_however_its_prompt_is_cut(dtype: torch.dtype) -> None:
    inputs = make_inputs(Case("whole", ((0, 150),), group=3, head_dim=64), dtype, "cpu")
    whole = attend_prompts(inputs, 0.1, 0)
    for first, last in ((0, 1), (0, 70), (70, 143), (143, 150)):
        cut = Inputs(
            inputs.q[first:last], inputs.kv, inputs.tables, [last], [0, last - first], None
        )
        assert torch.equal(attend_prompts(cut, 0.1, 0), whole[first:last])


LONG_CASES = (
    Case("group of three", ((0, 330),), group=3, head_dim=64),
    Case("narrow heads, odd blocks", ((0, 330),), group=1, block_size=5),
    Case("a window and sinks", ((0, 330),), head_dim=32, window=150, has_sinks=True),
    Case("wide heads, bent", ((0, 330),), kv_heads=1, head_dim=256, cap=0.7),
)


@needs_host_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_few_rows_behind_a_long_prefix_are_those_of_the_whole_prompt(
    case: Case, dtype: torch.dtype
) -> None:
    inputs, scale = make_inputs(case, dtype, "cpu"), case.head_dim**-0.5
    whole = attend_prompts(inputs, scale, case.window)
    length = inputs.lens[0]
    for rows in (1, 2, 5, 16, 17, 33, 64, 65):
        tail = Inputs(
            inputs.q[-rows:],
            inputs.kv,
            inputs.tables,
            [length],
            [0, rows],
            inputs.sinks,
            inputs.cap,
        )
        assert torch.equal(attend_prompts(tail, scale, case.window), whole[-rows:]), rows


@needs_host_library
def test_more_threads_give_what_one_gives() -> None:
    inputs = make_inputs(Case("one long sequence", ((200, 1),), head_dim=32), torch.float32, "cpu")
    tables, lens = torch.from_numpy(padded_tables(inputs.tables)), torch.tensor(inputs.lens)
    prompt = make_inputs(Case("a prompt", ((0, 200),), head_dim=32), torch.float32, "cpu")
    x, gate_up = torch.randn(9, 64), torch.randn(9, 128)
    panels = host.in_panels(torch.randn(256, 64))
    assert panels is not None
    found = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        attended = host.decode_attention(
            inputs.q, inputs.kv, LAYER, tables, lens, scale=0.2, window=0, sinks=None
        )
        normed = host.add_rms_norm(x.clone(), x, x[0], 1e-6)
        product = host.few_rows(x[:2], panels.data_ptr(), None, 256)
        prompts = attend_prompts(prompt, 0.2, 0)
        found.append((attended, normed, host.silu_and_mul(gate_up), product, prompts))
    # Alone, a sequence is cut into as many parts as threads: its KV heads are shared out as
    # far as that comes out even, its context is split for the rest.
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(other, one)
    assert torch.equal(found[0][0], found[1][0]), "whole heads do not depend on the threads"


MIXED = ((700, 1), (3, 1), (16, 5), (0, 9))


@needs_host_library
@pytest.mark.parametrize(
    ("chunks", "num_decode"), [(MIXED, 2), (MIXED[:2], 2), (MIXED[2:], 0)], ids=str
)
def test_step(chunks: tuple[tuple[int, int], ...], num_decode: int) -> None:
    case = Case("mixed", chunks, head_dim=32, window=60)
    check_step(HostAttention, case, num_decode, torch.float32, "cpu")


@pytest.fixture
def _fresh_library() -> object:
    load_host_library.cache_clear()
    yield
    load_host_library.cache_clear()


@pytest.mark.usefixtures("_fresh_library")
def test_without_a_library_the_twins_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = functools.partial(load_library, package=tmp_path)
    monkeypatch.setattr(host_library, "load_library", nowhere)
    with caplog.at_level(logging.WARNING):
        assert not host.has_vectors(torch.zeros(2, 64))
        assert not host.has_attention(torch.zeros(1, 1, 2, 4, 1, 64))
    assert len(caplog.records) == 1, "it is said once"
    layer_cases.check_add_rms_norm(layer_ops.add_rms_norm, 2, True, torch.float32, "cpu")
    layer_cases.check_silu_and_mul(layer_ops.silu_and_mul, 2, torch.float32, "cpu")
    layer_cases.check_rope_and_write(layer_ops.rope_and_write, True, 64, torch.float32, "cpu")
