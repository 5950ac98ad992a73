"""vLLM's own messages, built by hand from steps; one of the modules that know its internals.

The fields change with vLLM's releases: `unknown_fields` names those that an installed release
expects and that we do not fill.

Tests: tests/vllm/test_internals.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from vllm import SamplingParams as VllmSampling
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import SamplerOutput
from vllm.v1.pool.metadata import PoolingMetadata

from kvmesh.engine.vllm_messages import NewSequence, VllmStep
from kvmesh.engine.vllm_pooling import POOLED

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
    (PoolingMetadata, POOLED),
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


def scheduler_output(
    step: VllmStep,
    sampling: VllmSampling,
    adapters: Mapping[str, LoRARequest],
    num_groups: int,
) -> SchedulerOutput:
    """The message of vLLM's scheduler for a step.

    Args:
        sampling: of every sequence; its values do not matter, since we choose the tokens.
        adapters: those that are loaded, by id.
        num_groups: groups of layers with block tables of their own.
    """
    known = CachedRequestData(
        req_ids=[each.name for each in step.known],
        resumed_req_ids=set(),
        new_token_ids=[[] for _ in step.known],
        all_token_ids={},
        new_block_ids=[
            tuple(each.more_blocks) if any(each.more_blocks) else None for each in step.known
        ],
        num_computed_tokens=[each.start for each in step.known],
        num_output_tokens=[each.num_sampled for each in step.known],
    )
    return SchedulerOutput(
        scheduled_new_reqs=[
            # An adapter that is not loaded is an error: without it the KV would be wrong.
            _new_request(each, sampling, adapters[each.adapter] if each.adapter else None)
            for each in step.new
        ],
        scheduled_cached_reqs=known,
        num_scheduled_tokens=step.num_tokens,
        total_num_scheduled_tokens=sum(step.num_tokens.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[0] * num_groups,
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
        block_ids=tuple(new.blocks),
        num_computed_tokens=new.start,
        lora_request=adapter,
    )
