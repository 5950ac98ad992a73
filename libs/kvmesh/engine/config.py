"""Architecture of a checkpoint, as values. Torch-free; read from files by checkpoint.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

RowFactors = tuple[tuple[str, tuple[tuple[int, float], ...]], ...]
"""Factors of weight rows: per tensor name, runs of (number of rows, factor); 0 rows for all."""


class Rotation(Enum):
    """Rotary embedding of a layer."""

    USUAL = "usual"
    LOCAL = "local"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        kind: "default", "dynamic", "linear", "llama3", "longrope", "proportional" or "yarn".
        factor: factor by which "linear", "llama3", "proportional" and "yarn" extend the context.
        low_freq_factor, high_freq_factor: for "llama3" only.
        original_max_positions: for "llama3", "longrope" and "yarn".
        beta_fast, beta_slow, truncate: for "yarn", whose ramp lies between these numbers of turns.
        scale: factor of cosines and sines; 1 except for "longrope" and "yarn".
        pair_factors: for "longrope", the divisor of each pair's frequency.
        long_factors: for "longrope", the divisors beyond the original length; empty once
            `for_length` has chosen.
        share: for "proportional", fraction of the pairs that are rotated, the fastest ones.
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
        """Returns the embedding that serves sequences of up to `length` positions.

        "longrope" has one for the original length and one for longer sequences. Cached keys are
        rotated, so a cache can hold keys of only one of them.
        """
        if not self.long_factors:
            return self
        is_long = length > self.original_max_positions
        factors = self.long_factors if is_long else self.pair_factors
        return replace(self, pair_factors=factors, long_factors=())


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Query scaling by position: queries grow by a fraction for each e-fold of the distance.

    Attributes:
        share: growth as a fraction of a query's length; 0 for none.
        length: number of leading positions whose queries are not scaled.
    """

    share: float
    length: int


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of the keys and values that an attention layer keeps per position."""

    num_kv_heads: int
    head_dim: int

    @property
    def values(self) -> int:
        """Number of values in keys and values of one position."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts.

    Attributes:
        intermediate_size: intermediate size of one expert.
        normalize: the weights of the chosen experts sum to 1.
        sparse_layers: layers with experts; the others have one dense MLP.
        shared_size: intermediate size of the shared expert; 0 for none.
        num_groups, top_groups: number of expert groups, and of the best ones to choose from.
        scale: factor of the chosen experts' weights.
        biased_choice: a stored bias is added to the scores for the choice.
        latent_size: input and output size of routed experts; 0 for the hidden size.
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
        query_rank: size of the compressed queries; 0 if they are not compressed.
        rank: size of the compressed keys and values.
        rope_dim: rotated elements of a query, and of the shared key beside the latent.
        nope_dim: elements of a query that are not rotated.
        value_dim: size of a head's values.
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
        """Number of values kept per position."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Linear layers, which carry a state instead of keeping positions.

    Attributes:
        layers: indexes of the linear layers.
        conv_kernel: number of inputs of the convolution before the recurrence; 1 for none.
        key_dim: size of queries and keys; 0 for a convolution without recurrence.
    """

    layers: frozenset[int]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def is_convolution(self) -> bool:
        """Whether the state is only the latest inputs of a convolution."""
        return not self.key_dim

    @property
    def conv_channels(self) -> int:
        """Number of values in queries, keys and values of one position."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def state_values(self) -> int:
        """Number of values of one layer's state: its matrix, and inputs of the convolution."""
        matrix = self.num_value_heads * self.key_dim * self.value_dim
        return matrix + self.conv_channels * (self.conv_kernel - 1)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder.

    Attributes:
        rope: rotary embedding of layers with full attention, and of all if `local_rope` is None.
        qkv_bias, output_bias: the attention projections have a bias.
        qk_norm: queries and keys are normalised per head.
        dtype: dtype of the weights in the files.
        eos_token_ids: union of generation_config.json and config.json.
        attention_scale: factor of the scores.
        windows: per layer, number of latest positions that a query sees; 0 for all.
        local_rope: rotary embedding of layers with a window, if they have their own.
        moe: None for a dense model.
        swiglu_alpha, swiglu_limit: parameters of gpt-oss's activation.
        rotary_dim: number of leading elements of a head that are rotated; 0 for all.
        latent: attention layers that keep a compressed KV.
        linear: layers that keep a state.
        residual_factors: factors of the stream and of the addition to it, in families that scale
            them: for attention, linear attention, and the MLP.
        decay_bound: logarithm of the fastest decay of a state, in families that bound it; or 0.
        double_shares: beta goes up to 2: a position may remove twice its key's content of a state.
        wide_qk_norm: queries are normalised over all heads at once, and so are keys.
        interleaved: rotated pairs are neighbours in the files.
        unrotated: attention layers whose queries and keys are not rotated.
        embedding_scale: factor of embeddings.
        logit_scale: factor of logits.
        attention_cap, logit_cap: bounds of soft-capping of scores and logits; 0 for none.
        query_growth: query scaling by position of all layers, in families that have it.
        state_norm_eps: epsilon of norms within Mamba layers; 0 if they have none.
        states_beside: layers with a state have attention, too.
        weight_factors: factors of weight rows, applied when the weights are read.
        layer_norm: norms are LayerNorms: they subtract the mean and add a bias.
        parallel: attention and MLP read the same stream.
        norm_each: with `parallel`, each of them has its own norm, in families with both variants.
        part_norms: outputs of attention and MLP are normalised, in families with both variants.
        head_gate: attention has a gate per head, in families with both variants.
        gated_mlp: dense MLPs have a gate.
        mlp_bias: MLPs without a gate have a bias.
        head_bias: logits have a bias.
        full_heads: heads of layers with full attention, if they differ.
        full_keys_as_values: those layers have no value projection; they use the projected keys.
        kv_sources: per layer, the layer whose keys and values it reads; empty if all layers have
            their own.
        wide_readers: layers that read another layer's KV have an MLP of twice the size.
        layer_input_size: size of a layer's per-layer embedding; 0 for none.
        layer_input_vocab: number of tokens that have per-layer embeddings.
        mlp_only: layers that consist of an MLP; if there are any, the other layers have no MLP.
        positions_before: index of position 0 in the table of learned positions; None without one.
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
        """Returns the config with rotary embeddings for sequences of up to `length` positions."""
        local = self.local_rope and self.local_rope.for_length(length)
        return replace(self, rope=self.rope.for_length(length), local_rope=local)

    @property
    def num_parameters(self) -> int:
        """Number of weights in matrices; norms and biases are left out."""
        attention = sum(self._mixer_parameters(layer) for layer in range(self.num_layers))
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        if self.positions_before is not None:
            embeddings += self.max_position_embeddings * self.hidden_size
        return attention + self._mlp_parameters + embeddings + self._layer_input_parameters

    @property
    def _layer_input_parameters(self) -> int:
        # One projection for all layers, and per layer a gate and an output projection.
        inputs = self.num_layers * self.layer_input_size
        return inputs * (self.layer_input_vocab + 3 * self.hidden_size)

    def _mixer_parameters(self, layer: int) -> int:
        if layer in self.mlp_only:
            return 0
        if self.linear is not None and self.is_linear(layer):
            values = self.linear.num_value_heads * self.linear.value_dim
            # A convolution without recurrence has a gate on its input and on its output.
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
        # The up-projection is stored twice: as it is, and absorbed.
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
        """Number of values that an attention layer keeps per position, except for `full_heads`."""
        if self.latent is not None:
            return self.latent.width
        return 2 * self.num_kv_heads * self.head_dim

    def head_shape(self, layer: int) -> HeadShape:
        """Returns the KV heads of an attention layer."""
        if self.full_heads is not None and not self.sliding(layer):
            return self.full_heads
        return HeadShape(self.num_kv_heads, self.head_dim)

    def kv_source(self, layer: int) -> int:
        """Returns the layer whose keys and values an attention layer reads, usually itself."""
        return self.kv_sources[layer] if self.kv_sources else layer

    def has_attention(self, layer: int) -> bool:
        """Returns whether the layer has attention."""
        if layer in self.mlp_only:
            return False
        return self.states_beside or not self.is_linear(layer)

    @property
    def state_values(self) -> int:
        """Number of values of one linear layer's state."""
        return 0 if self.linear is None else self.linear.state_values

    def is_linear(self, layer: int) -> bool:
        """Returns whether the layer carries a state."""
        return self.linear is not None and layer in self.linear.layers

    def sliding(self, layer: int) -> bool:
        """Returns whether the layer sees only a window."""
        return self.windows[layer] > 0

    def rotation(self, layer: int) -> Rotation:
        """Returns the rotary embedding of an attention layer."""
        if layer in self.unrotated:
            return Rotation.NONE
        own = self.local_rope is not None and self.sliding(layer)
        return Rotation.LOCAL if own else Rotation.USUAL
