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
        norm: [hidden], with the factor of logits in it.
        norm_bias: [hidden] of the last norm where it takes the mean out, else None.
        positions: [positions, hidden], learned, added to embeddings; None without them.
        layer_inputs: what layers are told besides the stream; None for nothing.
        head: to [vocab].
        ropes: those that the layers have.
        query_factors: [positions, 1], see `Step`; None for 1.
        stacks: the layers, those together that one call can compute.
        head_call: norm and head together; None where one call cannot compute them.
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
            keep: [kept] int64, rows that are wanted; None for all. The last layer computes no
                others once their keys and values are written.

        Returns:
            The residual stream and what the last layer adds to it, both [rows or kept, hidden];
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
        """What the head reads: [rows, hidden], from rows of `forward`; `x` is changed in place."""
        eps = self.config.rms_norm_eps
        if self.norm_bias is None:
            return layer_ops.add_rms_norm(x, delta, self.norm, eps)
        return layer_ops.add_layer_norm(x, delta, self.norm, self.norm_bias, eps)

    def logits(self, x: Tensor, delta: Tensor) -> Tensor:
        """Scores of the next token.

        Args:
            x, delta: [rows, hidden] from `forward`; `x` is changed in place.

        Returns:
            [rows, vocab] fp32, a tensor of its own.
        """
        if self.head_call is not None and takes(x):
            return self.bent(self.head_call.run(x, delta))
        return self.bent(self.head(self.normed(x, delta)).float())

    def bent(self, logits: Tensor) -> Tensor:
        """Logits, fp32, within the model's bound, where it has one."""
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
        files: entered.
        num_positions: longest sequence that will be run.

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
    # As transformers does it: a head that the files have wins over what config.json says.
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
    """[positions, 1], None for 1."""
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
    """[positions, hidden], None where the model has none."""
    first = config.positions_before
    if first is None:
        return None
    table = [(f"{prefix}.embed_positions.weight", first + config.max_position_embeddings)]
    rows = files.read_rows(table, config.hidden_size, dtype, device)
    return rows[first : first + num_positions]


def _rope_tables(
    config: ModelConfig, num_positions: int, dtype: torch.dtype, device: str
) -> dict[Rotation, RopeTable]:
    """Those that the layers have."""

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
    """Of the decoder's tensors; some files of models that see name them as if it were alone."""
    prefix = family.weight_prefix
    return prefix if files.has(f"{prefix}.{_EMBEDDING}") else "model"
