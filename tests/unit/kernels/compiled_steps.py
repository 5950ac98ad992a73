"""Whole steps on a device that is not there: nothing in them waits for what a tensor holds, and
every launch is one that CUDA takes, with a pool as large as an H200's, and keeps its numbers in
registers. Run by test_triton_kernels.py in a process of its own, without the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvmesh.core.types import SamplingParams
from kvmesh.engine import runner as runner_module
from kvmesh.engine.checkpoint import parse_model_config
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.kv_plan import kv_layout, plan_kv
from kvmesh.engine.kv_shape import PoolTensor
from kvmesh.engine.model import load_model
from kvmesh.engine.protocol import ModelSpec, SampledToken, SequenceChunk, StateChunk
from kvmesh.engine.runner import TorchRunner
from kvmesh.engine.sampler import choose
from kvmesh.engine.static_inputs import InputShape, StaticInputs
from kvmesh.engine.static_step import StaticStep
from kvmesh.engine.warm_up import warm_up
from tests.unit.kernels.no_device import device
from tests.unit.kernels.step_configs import CONFIGS

POOL_BYTES = 120 << 30
# Of a thread, that do not fit in its registers, by release of Triton; none under 3.6 and 3.8.
MOST_STACK_BYTES = {"3.7": 8, "3.9": 40}.get(triton.__version__.rpartition(".")[0], 0)
MAX_BATCH = 64
LINEAR_BY_TORCH = ("lfm2",)
"""Families whose linear layers have no kernel of their own."""
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_p=0.9, top_k=50, num_logprobs=3),
    SamplingParams(seed=3, min_p=0.1, presence_penalty=0.5),
)


class _AnyWeights:
    """Files that hold whatever is asked for, experts one by one."""

    def has(self, name: str) -> bool:
        return not name.endswith("gate_up_proj")

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def read_rows(
        self, parts: list[tuple[str, int]], columns: int | None, dtype: torch.dtype, device: str
    ) -> Tensor:
        tail = () if columns is None else (columns,)
        return torch.empty((sum(rows for _, rows in parts), *tail), dtype=dtype, device=device)


class _Pool(PoolTensor):
    def computed(self) -> None: ...


def _runner(config: ModelConfig) -> tuple[TorchRunner, StaticStep]:
    """A model of random proportions over a pool that fills the device, and its static step."""
    plan = plan_kv(config, "bfloat16", 16)
    layout = kv_layout(config, plan, dtype="bfloat16", fingerprint="")
    blocks = POOL_BYTES // layout.block_bytes
    memory = torch.empty(
        (blocks + 1) * layout.block_bytes // 2, dtype=torch.bfloat16, device="meta"
    )
    assert memory.numel() > 1 << 35
    files: Any = _AnyWeights()
    model = load_model(
        files, config, plan, num_positions=32_768, dtype=torch.bfloat16, device="meta"
    )
    spec = ModelSpec("m", config.vocab_size, 32_768, frozenset(), layout, plan.groups)
    pool: Any = _Pool(layout, blocks, memory)
    shape = InputShape(MAX_BATCH, 32_768, plan.block_size, plan.groups, blocks)
    inputs = StaticInputs(shape, "meta")
    step = StaticStep(model, inputs, pool.with_spare, plan)
    return TorchRunner(spec, model, plan, pool, "meta"), step


def _chunk(
    runner: TorchRunner, number: int, start: int, end: int, *, more: int = 0
) -> SequenceChunk:
    """`more` tokens of the prompt follow, so that none is sampled."""
    groups = runner.spec.groups
    table = list(range(-(-end // runner.spec.layout.block_size)))
    blocks = list(range(groups.state_blocks))
    return SequenceChunk(
        number,
        range(3, 3 + end + more),
        start,
        end,
        table,
        end,
        PARAMS[number % len(PARAMS)],
        sample=not more,
        more_tables=[table] * (len(groups.windows) - 1),
        state=StateChunk(blocks, blocks if start else []) if blocks else None,
    )


def _unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
    """Host memory that is not pinned, which there must be a device for."""
    del pin_memory
    return torch.empty(*args, **kwargs)


def _chosen(logits: Tensor, chunks: list[SequenceChunk]) -> list[SampledToken]:
    """All of sampling but the reading of what was chosen, which has to wait."""
    choose(logits, chunks)
    return [SampledToken(0)] * len(chunks)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", list(CONFIGS))
def test_steps(name: str) -> None:
    config = parse_model_config(CONFIGS[name], {}, origin=name)
    with (
        device(90) as launches,
        patch.object(torch, "zeros", _unpinned),
        patch.object(torch.cuda, "Event", lambda: None),
        patch.object(runner_module, "sample", _chosen),
        patch.object(runner_module, "_current", lambda _: nullcontext()),
    ):
        runner, step = _runner(config)
        for bucket in (MAX_BATCH, 1):
            step.compute(bucket)
        warm_up(runner, 4096)
        known = {each.variant for each in launches}
        decode = [_chunk(runner, n, 1000 * n + 40, 1000 * n + 41) for n in range(4)]
        prompts = [_chunk(runner, 4, 0, 2048), _chunk(runner, 5, 1024, 1500)]
        for count in (4, 3, 0):
            runner.execute([*decode[:count], *prompts])
        runner.execute([_chunk(runner, 6, 512, 547, more=100)])
        runner.execute(decode[:3])
    new = {each.kernel for each in launches if each.variant not in known}
    assert new == set(), "compiled while requests wait"
    kernels = {each.kernel for each in launches}
    norm = "_add_layer_norm_kernel" if config.layer_norm else "_add_rms_norm_kernel"
    assert {norm, "_draw_kernel"} <= kernels
    assert ("_latent_decode_kernel" in kernels) == (config.latent is not None)
    assert ("_prefill_kernel" in kernels) == (config.latent is None)
    assert ("_grouped_kernel" in kernels) == (config.moe is not None)
    has_kernels = config.linear is not None and name not in LINEAR_BY_TORCH
    assert ({"_scan_kernel", "_step_kernel"} <= kernels) == has_kernels
    assert {each.kernel for each in launches if each.stack_bytes > MOST_STACK_BYTES} == set()


class _CountedLaunches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations of torch that compute: neither views nor memory that is only taken."""

    number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aliases = [each.alias_info for each in func._schema.returns]
        is_view = any(each is not None and not each.is_write for each in aliases)
        self.number += not is_view and "empty" not in str(func)
        return func(*args, **(kwargs or {}))


def _launches(name: str, num_layers: int, bucket: int) -> int:
    origin = CONFIGS[name] | {"num_hidden_layers": num_layers}
    config = parse_model_config(origin, {}, origin=name)
    with (
        device(90) as launches,
        patch.object(torch, "zeros", _unpinned),
        patch.object(torch.cuda, "Event", lambda: None),
    ):
        _, step = _runner(config)
        counted = _CountedLaunches()  # type: ignore[no-untyped-call]
        with counted:
            step.compute(bucket)
    return len(launches) + counted.number


@pytest.mark.parametrize(
    ("name", "bucket", "most"),
    [("llama", 64, 9), ("llama", 1, 10), ("qwen3_moe", 1, 20)],
)
def test_a_layer_of_a_captured_step_launches_few_kernels(name: str, bucket: int, most: int) -> None:
    """Each costs a device two microseconds or so, whatever it computes."""
    assert _launches(name, 3, bucket) - _launches(name, 2, bucket) <= most


@pytest.mark.parametrize(
    "look",
    [Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.nonzero, bool, int, Tensor.numpy],
    ids=lambda look: look.__name__,
)
def test_whoever_would_wait_for_the_device_fails(look: Callable[[Tensor], object]) -> None:
    """So that the steps above show something."""
    with device(90), pytest.raises((RuntimeError, TypeError)):
        look(torch.zeros(1, dtype=torch.int64, device="meta"))
