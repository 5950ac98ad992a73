"""Tells vLLM's executor what to compute.

This, `vllm_cache`, `vllm_output` and `vllm_pooling` use its internals.

vLLM's scheduler and block manager stay unused. Internals change with vLLM's releases, so one minor
version is pinned (`vllm_check.MINOR`).

Tests: tests/vllm/test_equality.py, tests/vllm/test_ranks.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams as VllmSampling
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import destroy_model_parallel, get_pp_group
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.outputs import SamplerOutput

from kvmesh.core.errors import CheckpointError, ConfigError
from kvmesh.core.kv_groups import KvGroups
from kvmesh.engine.adapters import Adapter, check_width
from kvmesh.engine.kv_shape import SPARE_BLOCKS
from kvmesh.engine.protocol import EmbeddingSpec
from kvmesh.engine.rank_part import RankPart
from kvmesh.engine.vllm_cache import GivenCache
from kvmesh.engine.vllm_check import ORDER
from kvmesh.engine.vllm_memory import CacheMemory
from kvmesh.engine.vllm_messages import (
    EngineRequest,
    Place,
    VllmStep,
    adding_message,
    removing_message,
    step_message,
)
from kvmesh.engine.vllm_output import scheduler_output, unknown_fields
from kvmesh.engine.vllm_pooling import Pooling
from kvmesh.engine.vllm_ranks import Ranks

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum LoRA ranks that vLLM can be configured for."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Result of a step's forward pass, in vLLM's own order.

    Attributes:
        names: of the sequences.
        logits: [sequences, vocab] of the last position of each, in any dtype.
        logits_of: [rows, vocab] of a range of the step's positions, sequence after sequence.
        embeddings_of: float32 [dimensions] of the sequences at some indexes, given the number of
            dimensions of each, 0 for all.
    """

    names: list[str]
    logits: Tensor
    logits_of: Callable[[int, int], Tensor]
    embeddings_of: Callable[[Sequence[int], Sequence[int]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of a loaded model.

    Attributes:
        kv_dtype: name of the pool's dtype.
        content: values per head and position, of key and value together.
        code: name of the attention kernel, which decides the order of the values in a block.
        num_layers: layers that a block has room for.
        groups: groups of layers, each of which has blocks of its own.
        embedding: None if it has no embeddings that are computed as the model generates.
    """

    vocab_size: int
    max_model_len: int
    kv_dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    content: int
    block_bytes: int
    groups: KvGroups
    code: str
    embedding: EmbeddingSpec | None


class _OurChoice:
    """Takes the place of vLLM's sampler; it returns tokens that we have chosen already."""

    tokens: Tensor

    def __call__(self, logits: Tensor, sampling_metadata: object) -> SamplerOutput:
        return SamplerOutput(sampled_token_ids=self.tokens, logprobs_tensors=None)


class VllmExecutor:
    """Loads a model, or one rank's part of it, and computes its steps. Use one thread at a time."""

    def __init__(
        self,
        request: EngineRequest,
        memory: CacheMemory,
        place: Place | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Loads the model. Takes seconds.

        Args:
            memory: of this rank's KV cache.
            place: None: there are no other ranks.
            ranks: the other ranks, if this is their leader.

        Raises:
            ConfigError: this release of vLLM, or this model, does not fit.
        """
        unknown = unknown_fields()
        if unknown:
            raise ConfigError(f"unknown fields of this vLLM: {', '.join(unknown)}")
        self._request = request
        self._ranks = ranks
        self._rank = 0 if place is None else place.rank
        arguments = _arguments(request)
        config = arguments.create_engine_config(UsageContext.LLM_CLASS)
        if current_platform.is_cpu():
            # The CPU backend declares another order only, but its kernels take strides.
            config.cache_config.kv_cache_layout = ORDER
        executor_class = _executor_class(config, place, request.device)
        self._cache = GivenCache(request, config, memory, self._rank)
        with self._cache.given():
            # Its scheduler stays unused, but it makes executor and cache in this release's order.
            self._core = EngineCore(config, executor_class, log_stats=False)
        self._executor = self._core.model_executor
        self._runner: Any = self._executor.driver_worker.worker.model_runner
        self._choice = _OurChoice()
        self._runner.sampler = self._choice
        self.max_adapters, self.max_adapter_rank = _adapter_limits(request)
        if self.max_adapters:
            _empty_last_place(self._runner)
        self._hidden_size = int(config.model_config.get_hidden_size())
        self._adapters: dict[str, LoRARequest] = {}
        # vLLM knows adapters by numbers from 1 on; a number is never used again.
        self._adapter_numbers = itertools.count(1)
        for each in request.adapters:
            self._add_adapter(each)
        self._sampling = VllmSampling(temperature=0.0, max_tokens=1, ignore_eos=True)
        self._max_model_len = int(config.model_config.max_model_len)
        self._vocab_size = int(config.model_config.get_vocab_size())
        if not get_pp_group().is_first_rank:
            # vLLM makes the place for what the stage before sends in a warm-up, which is left out.
            self._runner.intermediate_tensors = self._runner.model.make_empty_intermediate_tensors(
                batch_size=request.max_tokens,
                dtype=config.model_config.dtype,
                device=self._runner.device,
            )
        # Every rank of the last stage has the whole hidden states; rank 0 answers.
        alone = not self._rank and request.num_stages == 1
        self._pooling = Pooling.of(config, arguments) if alone else None

    def facts(self) -> ModelFacts:
        """Properties of the loaded model."""
        part = self.part
        # The first of vLLM's groups that keeps keys and values.
        attention = self._runner.attn_groups[self._cache.order.index(0)][0]
        return ModelFacts(
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            kv_dtype=str(self._cache.dtype).removeprefix("torch."),
            block_size=part.positions,
            num_layers=part.num_layers,
            num_kv_heads=part.heads * self._request.tensor_parallel,
            content=part.content,
            block_bytes=part.block_values * self.value_bytes,
            groups=self._cache.groups,
            code=_kernel_code(attention),
            embedding=None if self._pooling is None else self._pooling.spec,
        )

    @property
    def part(self) -> RankPart:
        """The part of each block that this rank has."""
        return self._cache.part

    @property
    def group_order(self) -> tuple[int, ...]:
        """For each group of vLLM, its number as a kind of blocks: see `kv.groups.ArrivingBlock`."""
        return self._cache.order

    @property
    def value_bytes(self) -> int:
        """Bytes of a value of the KV's dtype."""
        return self._cache.dtype.itemsize

    def change_adapters(self, change: Adapter | str) -> None:
        """Loads an adapter on all ranks, or removes one by its id.

        Raises:
            CheckpointError: the adapter does not fit, or a rank lacks it; nothing is changed.
        """
        if isinstance(change, Adapter):
            self._add_adapter(change)
            self._tell(adding_message(change))
            if problem := next(filter(None, self._hear_problems()), ""):
                self.change_adapters(change.id)
                raise CheckpointError(problem)
        else:
            self._tell(removing_message(change))
            self._hear_problems()
            self._executor.remove_lora(self._adapters.pop(change).lora_int_id)

    def adapter_problem(self, change: Adapter | str) -> str:
        """Changes adapters of this rank alone; returns why an adapter was not added, or nothing."""
        if isinstance(change, Adapter):
            try:
                self._add_adapter(change)
            except CheckpointError as error:
                return f"rank {self._rank}: {error}"
        elif (added := self._adapters.pop(change, None)) is not None:
            self._executor.remove_lora(added.lora_int_id)
        return ""

    def _hear_problems(self) -> list[str]:
        if self._ranks is None:
            return []
        return [str(message["problem"]) for message in self._ranks.hear()]

    def _add_adapter(self, adapter: Adapter) -> None:
        check_width(adapter, self._hidden_size)
        request = LoRARequest(adapter.name, next(self._adapter_numbers), str(adapter.folder))
        try:
            self._executor.add_lora(request)
        except Exception as error:  # each kind of mistake in the files raises its own
            self._executor.remove_lora(request.lora_int_id)
            reason = f"vLLM does not take the adapter {adapter.name}: {error}"
            raise CheckpointError(reason) from error
        self._adapters[adapter.id] = request

    def step(self, step: VllmStep, choose: Callable[[Computed], Sequence[int]]) -> None:
        """Computes a step together with the other ranks.

        Args:
            choose: gives a token for each row of `Computed.names`; those of sequences that have
                more of their prompt to compute are not used.
        """
        # As vLLM's own loop does; on a device tensors come from inference mode.
        with torch.inference_mode():
            self._tell(step_message(step))
            self._compute(step)
            state = self._runner.execute_model_state
            names = list(self._runner.input_batch.req_ids)
            # Gathered from all ranks, so each of them has its KV of this step in the pool.
            logits = state.logits[: len(names), : self._vocab_size]
            tokens = choose(Computed(names, logits, self._told_logits, self._embeddings_of))
            self._tell({"tokens": list(tokens)})
            self._take(tokens)

    def follow(self, step: VllmStep, hear: Callable[[], Mapping[str, Any]]) -> None:
        """Computes a follower's part of a step.

        Args:
            hear: waits for the leader's next message.
        """
        with torch.inference_mode():
            self._compute(step)
            while "tokens" not in (told := hear()):
                self._logits_of(*told["logits_of"])
            self._take(told["tokens"])

    def close(self) -> None:
        """Ends the executor."""
        self._executor.shutdown()
        if self._ranks is not None:
            # A service ends without deleting its objects, and this frees the ranks' shared memory.
            destroy_model_parallel()

    def _tell(self, message: Mapping[str, Any]) -> None:
        if self._ranks is not None:
            self._ranks.tell(message)

    def _compute(self, step: VllmStep) -> None:
        self._cache.prepare(step)
        output = scheduler_output(step, self._sampling, self._adapters, len(self.group_order))
        told = self._executor.execute_model(output)
        assert told is None, "vLLM's runner sampled by itself"
        self._cache.save(step)

    def _take(self, tokens: Sequence[int]) -> None:
        """Gives vLLM's runner the sampled tokens."""
        chosen = torch.tensor(tokens, dtype=torch.int32, device=self._runner.device)
        self._choice.tokens = chosen[:, None]
        self._executor.sample_tokens(None)

    def _embeddings_of(self, indexes: Sequence[int], dimensions: Sequence[int]) -> list[Tensor]:
        assert self._pooling is not None, "checked when a sequence is admitted"
        hidden = self._runner.execute_model_state.sample_hidden_states
        return self._pooling.embed(hidden[list(indexes)], dimensions)

    def _told_logits(self, begin: int, end: int) -> Tensor:
        self._tell({"logits_of": (begin, end)})
        made = self._logits_of(begin, end)
        assert made is not None, "rank 0 has all of the vocabulary"
        return made[:, : self._vocab_size]

    def _logits_of(self, begin: int, end: int) -> Tensor | None:
        stages = get_pp_group()
        made: Tensor | None = None
        if stages.is_last_rank:
            hidden = self._runner.execute_model_state.hidden_states[begin:end]
            made = self._runner.model.compute_logits(hidden)
        if stages.world_size > 1:
            # As vLLM does with those of the last positions: the leader is in the first stage.
            told = {} if made is None else {"logits": made.contiguous()}
            heard = stages.broadcast_tensor_dict(told, src=stages.world_size - 1)
            made = heard.get("logits")
        return made


def _executor_class(config: VllmConfig, place: Place | None, device: int | None) -> type[Executor]:
    """The executor class of vLLM for one rank alone, or the one for engines that a launcher starts.

    They take rank, rendezvous and device from the environment or the config. Here these are
    arguments, because several engines may share an environment.

    Args:
        device: number of the first device on this host; None: ranks compute on CPUs.
    """
    first = device or 0
    if place is None:
        alone: type[Executor] = Executor.get_class(config)

        def start(executor: Any) -> tuple[str, int, int]:
            method, rank, _ = alone._distributed_args(executor)
            return method, rank, first

        return type("AloneExecutor", (alone,), {"_distributed_args": start})

    def meet(_executor: object) -> tuple[str, int, int]:
        return place.meeting, place.rank, first + place.local

    return type("RankExecutor", (ExecutorWithExternalLauncher,), {"_distributed_args": meet})


def _arguments(request: EngineRequest) -> EngineArgs:
    return EngineArgs(
        model=str(request.folder),
        runner="generate",  # also where the folder says that it is for embeddings
        skip_tokenizer_init=True,
        dtype=request.dtype,
        seed=0,
        max_model_len=request.max_model_len or -1,
        max_num_seqs=request.max_sequences,
        max_num_batched_tokens=request.max_tokens,
        block_size=request.block_size,
        # vLLM keeps one block for itself: it allocates one more, behind ours.
        num_gpu_blocks_override=request.num_blocks + SPARE_BLOCKS,
        # Only what is overridden counts, but without a number half of the machine is asked for.
        kv_cache_memory_bytes=1 << 20,
        # On a device: the pool's size is given, and other workers may have memory there, too.
        gpu_memory_utilization=0.01,
        enable_prefix_caching=False,
        async_scheduling=False,
        enforce_eager=not request.graphs,
        # Attention stays outside of such graphs, so the cache may move after they were captured.
        compilation_config={"cudagraph_mode": "PIECEWISE"} if request.graphs else {},
        disable_log_stats=True,
        tensor_parallel_size=request.tensor_parallel,
        pipeline_parallel_size=request.num_stages,
        distributed_executor_backend="uni" if request.num_ranks == 1 else "external_launcher",
        **_lora_arguments(request),
    )


def _adapter_limits(request: EngineRequest) -> tuple[int, int]:
    """The number of adapters that an engine holds, and the longest rank that it takes."""
    count = max(request.max_adapters, len(request.adapters))
    if not count:
        return 0, 0
    longest = max(request.max_adapter_rank, *(each.rank for each in request.adapters), 1)
    rank = next((each for each in _LORA_RANKS if each >= longest), 0)
    if not rank:
        raise ConfigError(f"vLLM takes adapters up to rank {_LORA_RANKS[-1]}, not {longest}")
    return count, rank


def _lora_arguments(request: EngineRequest) -> dict[str, Any]:
    count, rank = _adapter_limits(request)
    if not count:
        return {}
    # A step may hold sequences of all of them; the last place stays empty (`_empty_last_place`).
    return {"enable_lora": True, "max_loras": count + 1, "max_lora_rank": rank}


def _empty_last_place(runner: Any) -> None:
    """Clears the last adapter place, so that it changes nothing.

    vLLM gives sequences without an adapter the place -1, which on a CPU means the last one.
    """
    adapters = runner.lora_manager._adapter_manager
    for module in adapters.modules.values():
        module.reset_lora(adapters.lora_slots - 1)


def _kernel_code(attention: Any) -> str:
    """Name of the attention kernel; on a CPU, of the instruction set, which orders the keys."""
    builder = attention.get_metadata_builder()
    return str(getattr(builder, "isa", attention.backend.get_name()))
