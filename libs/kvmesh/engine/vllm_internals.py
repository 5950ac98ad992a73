"""The only module that uses vLLM's internals: it tells vLLM's executor what to compute.

vLLM's scheduler and block manager stay unused. The messages built here by hand change with vLLM's
releases, so one minor version is pinned (`vllm_check.MINOR`), and `unknown_fields` names the fields
that an installed release expects and that we do not fill.

Tests: tests/vllm/test_internals.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams as VllmSampling
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout
from vllm.v1.outputs import SamplerOutput

from kvmesh.core.errors import ConfigError
from kvmesh.engine.adapters import Adapter

ORDER = "BLHNC"
"""Physical order of the pool: a block is one range over all layers, and each layer a part of it."""

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum LoRA ranks that vLLM can be configured for."""

_NEW = frozenset(
    {
        "req_id",
        "prompt_token_ids",
        "mm_features",
        "sampling_params",
        "pooling_params",
        "block_ids",
        "num_computed_tokens",
        "lora_request",
    }
)
_STEP = frozenset(
    {
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "scheduled_encoder_inputs",
        "num_common_prefix_blocks",
        "finished_req_ids",
        "free_encoder_mm_hashes",
    }
)
_GOING_ON = frozenset(
    {
        "req_ids",
        "resumed_req_ids",
        "new_token_ids",
        "all_token_ids",
        "new_block_ids",
        "num_computed_tokens",
        "num_output_tokens",
    }
)
_CHOSEN = frozenset({"sampled_token_ids", "logprobs_tensors"})

GIVEN: tuple[tuple[type, frozenset[str]], ...] = (
    (NewRequestData, _NEW),
    (CachedRequestData, _GOING_ON),
    (SchedulerOutput, _STEP),
    (SamplerOutput, _CHOSEN),
)
"""vLLM's message classes that we build, and the fields of each that we fill."""


def unknown_fields(given: Iterable[tuple[type, frozenset[str]]] = GIVEN) -> list[str]:
    """Required fields of vLLM's messages that we do not fill, and fields we fill that do not exist.

    Returns:
        Each as `Class.field`; empty for the version that this module was written for.
    """
    found = []
    for kind, filled in given:
        fields = {field.name: field for field in dataclasses.fields(kind)}
        missing = {
            name
            for name, field in fields.items()
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        } - filled
        found += [f"{kind.__name__}.{name}" for name in sorted(missing | filled - fields.keys())]
    return found


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What a vLLM engine on a CPU is made with.

    Attributes:
        max_model_len: 0 for as many positions as the model was made for and blocks hold.
        num_blocks: those that are given away; one more is allocated.
        max_tokens, max_sequences: of one step.
    """

    folder: Path
    dtype: str
    num_blocks: int
    block_size: int
    max_model_len: int
    max_tokens: int
    max_sequences: int
    adapters: tuple[Adapter, ...] = ()


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that vLLM has not seen, or not with these blocks.

    Attributes:
        name: used for no other.
        start: positions before it have KV in the blocks.
        adapter: its name; empty is none.
    """

    name: str
    token_ids: list[int]
    blocks: list[int]
    start: int
    adapter: str


@dataclass(frozen=True, slots=True)
class KnownSequence:
    """A sequence that goes on.

    Attributes:
        more_blocks: those after the ones that vLLM was told of.
        num_sampled: tokens that were chosen since it was new.
    """

    name: str
    more_blocks: list[int]
    start: int
    num_sampled: int


@dataclass(frozen=True, slots=True)
class VllmStep:
    """What one step computes.

    Attributes:
        finished: names that will not come again.
        num_tokens: positions to compute by name, of all in `new` and `known`.
    """

    new: list[NewSequence]
    known: list[KnownSequence]
    finished: set[str]
    num_tokens: dict[str, int]


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step's forward pass gave, in vLLM's own order.

    Attributes:
        names: of the sequences.
        logits: [sequences, vocab] of the last position of each, in any dtype.
        hidden: [positions, hidden], sequence after sequence.
    """

    names: list[str]
    logits: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of a loaded model.

    Attributes:
        kv_dtype: name of the pool's dtype.
        content: values per head and position, of key and value together.
        code: name of the attention kernel, which decides the order of the values in a block.
    """

    vocab_size: int
    max_model_len: int
    kv_dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    content: int
    block_bytes: int
    code: str


class _OurChoice:
    """Takes the place of vLLM's sampler; it returns tokens that we have chosen already."""

    tokens: Tensor

    def __call__(self, logits: Tensor, sampling_metadata: object) -> SamplerOutput:
        return SamplerOutput(sampled_token_ids=self.tokens, logprobs_tensors=None)


class VllmExecutor:
    """A model that vLLM loaded, and its steps. One thread at a time."""

    def __init__(self, request: EngineRequest) -> None:
        """Loads the model. Takes seconds.

        Raises:
            ConfigError: this release of vLLM, or this model, does not fit.
        """
        unknown = unknown_fields()
        if unknown:
            raise ConfigError(f"this vLLM wants what we do not give it: {', '.join(unknown)}")
        _allow_order_on_cpu()
        config = _arguments(request).create_engine_config(UsageContext.LLM_CLASS)
        # Its scheduler stays unused, but it makes executor and cache in the order of this release.
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._executor = self._core.model_executor
        self._runner: Any = self._executor.driver_worker.worker.model_runner
        self._choice = _OurChoice()
        self._runner.sampler = self._choice
        if request.adapters:
            _empty_last_place(self._runner)
        # vLLM knows adapters by numbers from 1 on.
        self._adapters = {
            each.name: LoRARequest(each.name, number, str(each.folder))
            for number, each in enumerate(request.adapters, 1)
        }
        self._sampling = VllmSampling(temperature=0.0, max_tokens=1, ignore_eos=True)
        self._max_model_len = int(config.model_config.max_model_len)
        self._vocab_size = int(config.model_config.get_vocab_size())

    def facts(self) -> ModelFacts:
        """Properties of the loaded model.

        Raises:
            ConfigError: some layers do not keep the keys and values of all positions.
        """
        groups = self._runner.kv_cache_config.kv_cache_groups
        if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
            kinds = ", ".join(sorted(type(each.kv_cache_spec).__name__ for each in groups))
            raise ConfigError(
                f"engine vllm serves models whose layers all keep full attention's KV, not {kinds}"
            )
        caches: list[Tensor] = self._runner.kv_caches
        _, heads, block_size, content = caches[0].shape
        block_bytes = caches[0].stride(0) * caches[0].element_size()
        used = len(caches) * heads * block_size * content * caches[0].element_size()
        if used != block_bytes or len({each.untyped_storage().data_ptr() for each in caches}) != 1:
            raise ConfigError("this model's KV blocks are not one range of bytes each")
        attention = self._runner.attn_groups[0][0]
        return ModelFacts(
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            kv_dtype=str(caches[0].dtype).removeprefix("torch."),
            block_size=block_size,
            num_layers=len(caches),
            num_kv_heads=heads,
            content=content,
            block_bytes=block_bytes,
            code=_kernel_code(attention),
        )

    def move_cache(self, memory: memoryview) -> None:
        """Puts the cache elsewhere in host memory; what it held is lost.

        Args:
            memory: as large as the cache is.
        """
        flat = torch.frombuffer(memory, dtype=torch.int8)
        caches: list[Tensor] = self._runner.kv_caches
        assert memory.nbytes == caches[0].untyped_storage().nbytes(), "of another size"
        for cache in caches:
            place = cache.storage_offset(), cache.size(), cache.stride()
            cache.set_(flat.untyped_storage(), *place)

    def step(self, step: VllmStep, choose: Callable[[Computed], Sequence[int]]) -> None:
        """Computes a step.

        Args:
            choose: gives a token for each row of `Computed.names`; those of sequences that have
                more of their prompt to compute are not used.
        """
        # As vLLM's own loop does; on a device tensors come from inference mode.
        with torch.inference_mode():
            output = _scheduler_output(step, self._sampling, self._adapters)
            told = self._executor.execute_model(output)
            assert told is None, "vLLM's runner sampled by itself"
            state = self._runner.execute_model_state
            names = list(self._runner.input_batch.req_ids)
            logits = state.logits[: len(names), : self._vocab_size]
            tokens = choose(Computed(names, logits, state.hidden_states))
            self._choice.tokens = torch.tensor(
                tokens, dtype=torch.int32, device=state.logits.device
            )[:, None]
            self._executor.sample_tokens(None)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab] of [rows, hidden]."""
        made: Tensor = self._runner.model.compute_logits(hidden)
        return made[:, : self._vocab_size]

    def close(self) -> None:
        """Ends the executor."""
        self._executor.shutdown()


def _arguments(request: EngineRequest) -> EngineArgs:
    return EngineArgs(
        model=str(request.folder),
        skip_tokenizer_init=True,
        dtype=request.dtype,
        seed=0,
        max_model_len=request.max_model_len or -1,
        max_num_seqs=request.max_sequences,
        max_num_batched_tokens=request.max_tokens,
        block_size=request.block_size,
        # vLLM keeps one block for itself: it allocates one more, behind ours.
        num_gpu_blocks_override=request.num_blocks + 1,
        # Only what is overridden counts, but without a number half of the machine is asked for.
        kv_cache_memory_bytes=1 << 20,
        enable_prefix_caching=False,
        async_scheduling=False,
        enforce_eager=True,
        disable_log_stats=True,
        distributed_executor_backend="uni",
        **_lora_arguments(request.adapters),
    )


def _lora_arguments(adapters: Sequence[Adapter]) -> dict[str, Any]:
    if not adapters:
        return {}
    longest = max(each.rank for each in adapters)
    rank = next((each for each in _LORA_RANKS if each >= longest), 0)
    if not rank:
        raise ConfigError(f"vLLM takes adapters up to rank {_LORA_RANKS[-1]}, one has {longest}")
    # A step may hold sequences of all of them; the last place stays empty (`_empty_last_place`).
    return {"enable_lora": True, "max_loras": len(adapters) + 1, "max_lora_rank": rank}


def _empty_last_place(runner: Any) -> None:
    """Clears the last adapter place, so that it changes nothing.

    vLLM gives sequences without an adapter the place -1, which on a CPU means the last one.
    """
    adapters = runner.lora_manager._adapter_manager
    for module in adapters.modules.values():
        module.reset_lora(adapters.lora_slots - 1)


def _allow_order_on_cpu() -> None:
    """Lets vLLM's CPU backend lay the cache out in `ORDER`.

    Its kernels take strides, so they work with this order, but the backend declares only another
    one.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # noqa: PLC0415

    def orders(_cls: type) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout[ORDER],)

    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(orders)


def _kernel_code(attention: Any) -> str:
    """Name of the attention kernel in use.

    On a CPU it names the instruction set, since each kernel wants the keys in its own order.
    """
    builder = attention.get_metadata_builder()
    return str(getattr(builder, "isa", attention.backend.get_name()))


def _scheduler_output(
    step: VllmStep, sampling: VllmSampling, adapters: Mapping[str, LoRARequest]
) -> SchedulerOutput:
    known = CachedRequestData(
        req_ids=[each.name for each in step.known],
        resumed_req_ids=set(),
        new_token_ids=[[] for _ in step.known],
        all_token_ids={},
        new_block_ids=[(each.more_blocks,) if each.more_blocks else None for each in step.known],
        num_computed_tokens=[each.start for each in step.known],
        num_output_tokens=[each.num_sampled for each in step.known],
    )
    return SchedulerOutput(
        scheduled_new_reqs=[
            _new_request(each, sampling, adapters.get(each.adapter)) for each in step.new
        ],
        scheduled_cached_reqs=known,
        num_scheduled_tokens=step.num_tokens,
        total_num_scheduled_tokens=sum(step.num_tokens.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[0],
        finished_req_ids=step.finished,
        free_encoder_mm_hashes=[],
    )


def _new_request(
    new: NewSequence, sampling: VllmSampling, adapter: LoRARequest | None
) -> NewRequestData:
    return NewRequestData(
        req_id=new.name,
        prompt_token_ids=new.token_ids,
        mm_features=[],
        sampling_params=sampling,
        pooling_params=None,
        block_ids=(new.blocks,),
        num_computed_tokens=new.start,
        lora_request=adapter,
    )
