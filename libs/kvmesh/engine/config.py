"""Architecture of a checkpoint, as values. Torch-free; read from files by checkpoint.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

RowFactors = tuple[tuple[str, tuple[tuple[int, float], ...]], ...]
"""By name of a layer's tensor, runs of rows and what those are multiplied by; 0 rows for all."""


class Rotation(Enum):
    """Which rotary embedding a layer has."""

    USUAL = "usual"
    LOCAL = "local"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        kind: "default", "dynamic", "linear", "llama3", "longrope", "proportional" or "yarn".
        factor: how far "linear", "llama3", "proportional" and "yarn" stretched the context.
        low_freq_factor, high_freq_factor: of "llama3" only.
        original_max_positions: of "llama3", "longrope" and "yarn".
        beta_fast, beta_slow, truncate: of "yarn", whose ramp lies between those many turns.
        scale: factor of cosines and sines; 1 but for "longrope" and "yarn".
        pair_factors: of "longrope", what the frequency of each pair is divided by.
        long_factors: the same for lengths above the original one; none once one is chosen.
        share: of "proportional", of the pairs that are rotated, the fastest ones.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    scale: float = 1.0
    pair_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    share: float = 1.0

    def for_length(self, length: int) -> RopeConfig:
        """The one embedding that serves sequences of up to `length` positions.

        "longrope" has one for the original length and one for all that is longer. Cached keys are
        rotated, so a cache holds those of one of them.
        """
        if not self.long_factors:
            return self
        is_long = length > self.original_max_positions
        factors = self.long_factors if is_long else self.pair_factors
        return replace(self, pair_factors=factors, long_factors=())


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries far behind the beginning are longer: by a share for each e-fold of the distance.

    Attributes:
        share: of a query's length; 0 for none.
        length: positions before which queries stay as they are.
    """

    share: float
    length: int


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What attention layers keep of one position: keys and values of so many heads."""

    num_kv_heads: int
    head_dim: int

    @property
    def values(self) -> int:
        """Of keys and values."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts.

    Attributes:
        intermediate_size: of one expert.
        normalize: weights of the chosen experts sum to 1.
        sparse_layers: layers that have experts; the others have one dense MLP.
        shared_size: of the expert that all rows take; 0 for none.
        num_groups, top_groups: experts are chosen from the best groups only.
        scale: factor of the chosen ones' weights.
        biased_choice: a stored bias takes part in the choice.
        latent_size: of what chosen experts read and give; 0 for the model's own size.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    normalize: bool
    sparse_layers: frozenset[int]
    shared_size: int = 0
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    biased_choice: bool = False
    latent_size: int = 0


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Attention over a compressed KV that all heads share (MLA).

    Attributes:
        query_rank: of the compressed queries; 0 when they are not.
        rank: of the compressed keys and values.
        rope_dim: rotated elements of a query and of the one key beside the latent.
        nope_dim: elements of a query that are not rotated.
        value_dim: of a head's values.
        interleaved: rotated pairs are neighbours in the files.
    """

    query_rank: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    interleaved: bool

    @property
    def width(self) -> int:
        """Values kept per position."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Layers that carry a state instead of keeping positions.

    Attributes:
        layers: which they are.
        conv_kernel: inputs that the convolution before the recurrence spans; 1 for none.
        key_dim: of queries and keys; 0 where there is a convolution and no recurrence.
    """

    layers: frozenset[int]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def is_convolution(self) -> bool:
        """Whether a state is what a convolution saw last, and nothing else."""
        return not self.key_dim

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values of one position."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def state_values(self) -> int:
        """Values that one layer carries on: its matrix, and inputs of the convolution."""
        matrix = self.num_value_heads * self.key_dim * self.value_dim
        return matrix + self.conv_channels * (self.conv_kernel - 1)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder.

    Attributes:
        rope: of layers with full attention, and of all when `local_rope` is None.
        qkv_bias, output_bias: of the attention projections.
        qk_norm: queries and keys are normalised per head.
        dtype: of the weights in the files.
        eos_token_ids: of generation_config.json and config.json together.
        attention_scale: factor of the scores.
        windows: per layer, latest positions that a query sees; 0 for all.
        local_rope: of layers with a window, when they have their own.
        moe: None for a dense model.
        swiglu_alpha, swiglu_limit: of gpt-oss's activation.
        rotary_dim: leading elements of a head that are rotated; 0 for all.
        latent: of attention layers that keep a compressed KV.
        linear: of layers that keep a state.
        residual_factors: of the stream and of what is added to it, where a family scales them: by
            attention, by linear attention, by the MLP.
        decay_bound: logarithm of the fastest decay of a state, where a family bounds it; or 0.
        double_shares: a position may take back twice what a state holds for its key.
        wide_qk_norm: queries are normalised over all heads at once, and so are keys.
        interleaved: rotated pairs are neighbours in the files.
        unrotated: layers with attention whose queries and keys are not rotated.
        embedding_scale: factor of embeddings.
        logit_scale: factor of logits.
        attention_cap, logit_cap: scores and logits are bent to stay within; 0 for not.
        query_growth: of all layers, where a family has it.
        state_norm_eps: of norms within Mamba layers; 0 where these have none.
        states_beside: layers that carry a state have attention too.
        weight_factors: of what layers read.
        layer_norm: norms take the mean out and add a bias.
        parallel: attention and MLP read the same stream.
        norm_each: then each of them has a norm of its own, where a family has both ways.
        part_norms: what attention and MLP give has a norm, where a family has both ways.
        head_gate: attention has a gate for each head, where a family has both ways.
        gated_mlp: dense MLPs have a gate.
        mlp_bias: of MLPs without one.
        head_bias: logits have one.
        full_heads: of layers with full attention, where theirs are others.
        full_keys_as_values: those layers have no projection of values: they are what keys are
            projected to.
        kv_sources: per layer, the layer whose keys and values it reads; empty where all have their
            own.
        wide_readers: layers that read another's have an MLP of twice the size.
        layer_input_size: of what each layer is told of a token besides the stream; 0 for nothing.
        layer_input_vocab: tokens that it is told something of.
        mlp_only: layers that are an MLP and nothing else; where there are some, others have none.
        positions_before: rows of the table of learned positions in front of the first one; None
            where there is no such table.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    dtype: str
    eos_token_ids: frozenset[int]
    attention_scale: float
    windows: tuple[int, ...]
    local_rope: RopeConfig | None = None
    moe: MoeConfig | None = None
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    rotary_dim: int = 0
    latent: LatentConfig | None = None
    linear: LinearConfig | None = None
    residual_factors: tuple[tuple[float, float], ...] = ()
    decay_bound: float = 0.0
    double_shares: bool = False
    wide_qk_norm: bool = False
    interleaved: bool = False
    unrotated: frozenset[int] = frozenset()
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    query_growth: QueryGrowth | None = None
    state_norm_eps: float = 0.0
    states_beside: bool = False
    weight_factors: RowFactors = ()
    layer_norm: bool = False
    parallel: bool = False
    norm_each: bool = False
    part_norms: bool = False
    head_gate: bool = False
    gated_mlp: bool = True
    mlp_bias: bool = False
    head_bias: bool = False
    full_heads: HeadShape | None = None
    full_keys_as_values: bool = False
    kv_sources: tuple[int, ...] = ()
    wide_readers: bool = False
    layer_input_size: int = 0
    layer_input_vocab: int = 0
    mlp_only: frozenset[int] = frozenset()
    positions_before: int | None = None

    def for_length(self, length: int) -> ModelConfig:
        """The config with the rotary embeddings of sequences of up to `length` positions."""
        local = self.local_rope and self.local_rope.for_length(length)
        return replace(self, rope=self.rope.for_length(length), local_rope=local)

    @property
    def num_parameters(self) -> int:
        """Weights in the matrices; norms and biases are left out."""
        attention = sum(self._mixer_parameters(layer) for layer in range(self.num_layers))
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        if self.positions_before is not None:
            embeddings += self.max_position_embeddings * self.hidden_size
        return attention + self._mlp_parameters + embeddings + self._layer_input_parameters

    @property
    def _layer_input_parameters(self) -> int:
        # One projection for all layers, and for each a gate and a way back.
        inputs = self.num_layers * self.layer_input_size
        return inputs * (self.layer_input_vocab + 3 * self.hidden_size)

    def _mixer_parameters(self, layer: int) -> int:
        if layer in self.mlp_only:
            return 0
        if self.linear is not None and self.is_linear(layer):
            values = self.linear.num_value_heads * self.linear.value_dim
            # A convolution alone has a gate on either side.
            others = 3 if self.linear.is_convolution else 2
            own = self.hidden_size * (self.linear.conv_channels + others * values)
            return own + (self._attention_parameters(layer) if self.states_beside else 0)
        return self._attention_parameters(layer)

    def _attention_parameters(self, layer: int) -> int:
        latent = self.latent
        if latent is None:
            shape = self.head_shape(layer)
            own = shape.num_kv_heads if self.kv_source(layer) == layer else 0
            return 2 * (self.num_heads + own) * shape.head_dim * self.hidden_size
        query = self.num_heads * (latent.nope_dim + latent.rope_dim)
        inner = latent.query_rank or self.hidden_size
        queries = inner * query + latent.query_rank * self.hidden_size
        # The up-projection is there twice: as it is, and absorbed.
        up = 2 * latent.rank * self.num_heads * (latent.nope_dim + latent.value_dim)
        output = self.num_heads * latent.value_dim * self.hidden_size
        return queries + up + output + latent.width * self.hidden_size

    @property
    def _mlp_parameters(self) -> int:
        matrices = 3 if self.gated_mlp else 2
        one_dense = matrices * self.hidden_size * self.intermediate_size
        num_mlps = len(self.mlp_only) or self.num_layers
        if self.wide_readers:
            num_mlps += sum(self.kv_source(layer) != layer for layer in range(self.num_layers))
        if self.moe is None:
            return num_mlps * one_dense
        latent = self.moe.latent_size
        expert = matrices * (latent or self.hidden_size) * self.moe.intermediate_size
        shared = matrices * self.hidden_size * self.moe.shared_size
        others = shared + 2 * latent * self.hidden_size
        sparse = self.moe.num_experts * (expert + self.hidden_size) + others
        num_sparse = len(self.moe.sparse_layers)
        return (num_mlps - num_sparse) * one_dense + num_sparse * sparse

    @property
    def kv_values(self) -> int:
        """Values that one attention layer keeps per position, those of `full_heads` apart."""
        if self.latent is not None:
            return self.latent.width
        return 2 * self.num_kv_heads * self.head_dim

    def head_shape(self, layer: int) -> HeadShape:
        """Heads of keys and values of a layer with attention."""
        if self.full_heads is not None and not self.sliding(layer):
            return self.full_heads
        return HeadShape(self.num_kv_heads, self.head_dim)

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer with attention reads: itself, mostly."""
        return self.kv_sources[layer] if self.kv_sources else layer

    def has_attention(self, layer: int) -> bool:
        """Whether the layer has attention."""
        if layer in self.mlp_only:
            return False
        return self.states_beside or not self.is_linear(layer)

    @property
    def state_values(self) -> int:
        """Values that one linear layer carries on."""
        return 0 if self.linear is None else self.linear.state_values

    def is_linear(self, layer: int) -> bool:
        """Whether the layer carries a state."""
        return self.linear is not None and layer in self.linear.layers

    def sliding(self, layer: int) -> bool:
        """Whether the layer sees a window only."""
        return self.windows[layer] > 0

    def rotation(self, layer: int) -> Rotation:
        """The rotary embedding of a layer with attention."""
        if layer in self.unrotated:
            return Rotation.NONE
        own = self.local_rope is not None and self.sliding(layer)
        return Rotation.LOCAL if own else Rotation.USUAL
