"""A decoder over paged KV: embedding, the family's layers, norm and head.

Tests: tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.engine.config import ModelConfig, Rotation
from kvmesh.engine.families import FAMILIES
from kvmesh.engine.families.family import Family
from kvmesh.engine.kv_plan import KvPlace, KvPlan
from kvmesh.engine.layer_inputs import LayerInputs, load_layer_inputs
from kvmesh.engine.layer_stack import stacked
from kvmesh.engine.layers import Layer, Step, StepMemory
from kvmesh.engine.models import LAYER_LOADERS
from kvmesh.engine.rope import RopeTable, query_factors, resting_table, rope_table
from kvmesh.engine.weights import LayerWeights, WeightFiles
from kvmesh.kernels import layer_ops, reference
from kvmesh.kernels.host_layer import HeadCall, takes
from kvmesh.kernels.linear import Linear, make_linear
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)
_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """Weights and the forward pass; holds no state of sequences.

    Attributes:
        embedding: [vocab, hidden].
        embedding_scale: factor of looked-up embeddings.
        norm: [hidden], the final norm's weight, multiplied by the factor of logits.
        norm_bias: [hidden], bias of the final norm if it is a LayerNorm, else None.
        positions: [positions, hidden], learned, added to embeddings; None without them.
        layer_inputs: per-layer embeddings; None without them.
        head: projection to [vocab].
        ropes: rotary tables, one per rotation of the layers.
        query_factors: [positions, 1], see `Step`; None for 1.
        stacks: the layers; layers that one native call can compute together are one entry.
        head_call: final norm and head in one native call; None if it does not support them.
    """

    config: ModelConfig
    embedding: Tensor
    embedding_scale: float
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear
    ropes: Mapping[Rotation, RopeTable]
    query_factors: Tensor | None = None
    norm_bias: Tensor | None = None
    positions: Tensor | None = None
    layer_inputs: LayerInputs | None = None
    stacks: tuple[Layer, ...] = field(init=False)
    head_call: HeadCall | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stacks", stacked(self.layers))
        call = None
        if self.norm_bias is None:
            call = HeadCall.of(self.norm, self.config.rms_norm_eps, self.head)
        object.__setattr__(self, "head_call", call)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        memory: StepMemory,
        keep: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs the rows of a step and writes their KV.

        Args:
            token_ids, positions: [rows] int64.
            memory: KV of the rows' sequences.
            keep: [kept] int64, rows whose results are wanted; None for all. The last layer computes
                the other rows only up to their keys and values.
                others once their keys and values are written.

        Returns:
            The residual stream and the last layer's addition to it, both [rows or kept, hidden];
            `normed` and `logits` take rows of them.
        """
        x = functional.embedding(token_ids, self.embedding)
        if self.embedding_scale != 1:
            x *= self.embedding_scale
        if self.positions is not None:
            x += self.positions.index_select(0, positions)
        told = None if self.layer_inputs is None else self.layer_inputs.of(token_ids, x)
        ropes = {kind: rope.rows(positions) for kind, rope in self.ropes.items()}
        factors = self.query_factors
        if factors is not None:
            factors = factors.index_select(0, positions)
        step = Step(memory, ropes, factors, told)
        delta: Tensor | None = None
        for layer in self.stacks[:-1]:
            x, delta = layer.run(x, delta, step, None)
        return self.stacks[-1].run(x, delta, step, keep)

    def normed(self, x: Tensor, delta: Tensor) -> Tensor:
        """Returns the head's input [rows, hidden] from rows of `forward`; changes `x` in place."""
        eps = self.config.rms_norm_eps
        if self.norm_bias is None:
            return layer_ops.add_rms_norm(x, delta, self.norm, eps)
        return layer_ops.add_layer_norm(x, delta, self.norm, self.norm_bias, eps)

    def logits(self, x: Tensor, delta: Tensor) -> Tensor:
        """Returns the scores of the next token.

        Args:
            x, delta: [rows, hidden] from `forward`; `x` is changed in place.

        Returns:
            [rows, vocab] fp32, a new tensor.
        """
        if self.head_call is not None and takes(x):
            return self.bent(self.head_call.run(x, delta))
        return self.bent(self.head(self.normed(x, delta)).float())

    def bent(self, logits: Tensor) -> Tensor:
        """Applies the model's logit soft-capping to fp32 logits, if it has any."""
        cap = self.config.logit_cap
        return reference.capped(logits, cap) if cap else logits


def load_model(
    files: WeightFiles,
    config: ModelConfig,
    plan: KvPlan,
    *,
    num_positions: int,
    dtype: torch.dtype,
    device: str,
) -> DecoderModel:
    """Reads a model into device memory.

    Args:
        files: the opened weight files.
        num_positions: length of the longest sequence that will run.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    family, load_layer = FAMILIES[config.family], LAYER_LOADERS[config.family]
    hidden = config.hidden_size

    def matrix(name: str) -> Tensor:
        return files.read_rows([(name, config.vocab_size)], hidden, dtype, device)

    prefix = _decoder_prefix(files, family)

    def weights(layer: int, place: KvPlace) -> LayerWeights:
        state, factors = plan.state_places.get(layer), config.weight_factors
        return LayerWeights(files, layer, dtype, device, place, prefix, state, factors)

    embedding = matrix(f"{prefix}.{_EMBEDDING}")
    # As in transformers, a head in the files takes precedence over config.json.
    is_tied = config.tie_word_embeddings and not files.has(_HEAD)
    norm = files.read(f"{prefix}.norm.weight", (hidden,)).float() + family.norm_offset
    norm_bias = None
    if config.layer_norm:
        norm_bias = files.read(f"{prefix}.norm.bias", (hidden,)).to(device, dtype)
    head_bias = None
    if config.head_bias:
        head_bias = files.read("lm_head.bias", (config.vocab_size,)).to(device, dtype)
    scale = config.embedding_scale
    if family.rounds_embedding_scale:
        scale = float(torch.tensor(scale, dtype=dtype))
    return DecoderModel(
        config=config,
        embedding=embedding,
        embedding_scale=scale,
        layers=tuple(
            load_layer(weights(layer, place), config) for layer, place in enumerate(plan.places)
        ),
        norm=(norm * config.logit_scale).to(device, dtype),
        head=make_linear(embedding if is_tied else matrix(_HEAD), head_bias),
        ropes=_rope_tables(config, num_positions, dtype, device),
        query_factors=_query_factors(config, num_positions, dtype, device),
        norm_bias=norm_bias,
        positions=_learned_positions(files, config, prefix, num_positions, dtype, device),
        layer_inputs=load_layer_inputs(files, config, prefix, dtype, device),
    )


def _query_factors(
    config: ModelConfig, num_positions: int, dtype: torch.dtype, device: str
) -> Tensor | None:
    """Returns [positions, 1] query factors; None for 1."""
    growth = config.query_growth
    return None if growth is None else query_factors(growth, num_positions, dtype, device)


def _learned_positions(
    files: WeightFiles,
    config: ModelConfig,
    prefix: str,
    num_positions: int,
    dtype: torch.dtype,
    device: str,
) -> Tensor | None:
    """Returns learned positions, [positions, hidden]; None if the model has none."""
    first = config.positions_before
    if first is None:
        return None
    table = [(f"{prefix}.embed_positions.weight", first + config.max_position_embeddings)]
    rows = files.read_rows(table, config.hidden_size, dtype, device)
    return rows[first : first + num_positions]


def _rope_tables(
    config: ModelConfig, num_positions: int, dtype: torch.dtype, device: str
) -> dict[Rotation, RopeTable]:
    """Returns the rotary tables of all rotations that the layers use."""

    def table(kind: Rotation, head_dim: int) -> RopeTable:
        if kind is Rotation.NONE:
            return resting_table(head_dim, dtype, device)
        local = config.local_rope if kind is Rotation.LOCAL else None
        rope = local or config.rope
        if rope.kind == "longrope":
            original = rope.original_max_positions
            factors = "long" if num_positions > original else "short"
            log.info("rope_chosen", factors=factors, original=original, longest=num_positions)
        return rope_table(rope, head_dim, num_positions, dtype, device, config.rotary_dim)

    kinds = {
        config.rotation(layer): config.head_shape(layer).head_dim
        for layer in range(config.num_layers)
    }
    return {kind: table(kind, head_dim) for kind, head_dim in kinds.items()}


def _decoder_prefix(files: WeightFiles, family: Family) -> str:
    """Returns the name prefix of the decoder's tensors.

    Some files of vision-language models name them as in a text-only model.
    """
    prefix = family.weight_prefix
    return prefix if files.has(f"{prefix}.{_EMBEDDING}") else "model"
