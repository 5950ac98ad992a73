"""Whether a sequence can run on a worker at all. Tests: tests/unit/engine/test_core.py."""

from __future__ import annotations

from kvmesh.core.types import Refusal, RefusalReason, SequenceSpec
from kvmesh.engine.protocol import ModelSpec


def misfit(
    spec: SequenceSpec, model: ModelSpec, max_model_len: int, *, can_constrain: bool
) -> Refusal | None:
    """Why a sequence cannot run, however many blocks are free; None if it can."""
    num_tokens = len(spec.token_ids)
    here = model.layout.model_fingerprint
    if spec.fingerprint not in ("", here):
        text = f"its checkpoint is {spec.fingerprint}, this worker's is {here}"
        return Refusal(RefusalReason.STALE, text)
    if spec.adapter and spec.adapter not in model.adapters:
        return Refusal(RefusalReason.STALE, f"the adapter {spec.adapter} is not loaded here")
    if num_tokens + 1 > max_model_len:
        text = f"{num_tokens} tokens leave no room to generate in a context of {max_model_len}"
        return Refusal(RefusalReason.TOO_LONG, text)
    if max(spec.token_ids) >= model.vocab_size:
        text = f"token id {max(spec.token_ids)} is outside the vocabulary"
        return Refusal(RefusalReason.INVALID, text)
    if spec.sampling.structure is not None and not can_constrain:
        return Refusal(RefusalReason.INVALID, "this engine cannot follow structures")
    if spec.embedding >= 0:
        return _misfit_embedding(spec.embedding, model)
    return None


def _misfit_embedding(wanted: int, model: ModelSpec) -> Refusal | None:
    """Why an embedding of `wanted` dimensions, 0 for all, cannot be computed."""
    here = model.embedding
    if here is None:
        text = f"the engine {model.layout.engine} computes no embeddings of this model"
        return Refusal(RefusalReason.STALE, text)
    if wanted in (0, here.size) or wanted in here.shorter:
        return None
    allowed = str(here.size)
    if here.shorter:
        shorter = here.shorter
        allowed = f"1 to {here.size}" if isinstance(shorter, range) else f"{[*shorter, here.size]}"
    return Refusal(RefusalReason.INVALID, f"dimensions: {wanted}; this model allows {allowed}")
