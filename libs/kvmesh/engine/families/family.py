"""Interface of a model family to the engine, and helpers that families share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.config import LatentConfig, ModelConfig, MoeConfig, RopeConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.rope_fields import rope_of

SEEING_PREFIX = "model.language_model"
"""Name prefix of the decoder's tensors in a vision-language model."""


@dataclass(frozen=True, slots=True)
class Family:
    """Definition of one family.

    Attributes:
        configure: maps config.json and the config common to all families to the family's config.
        defaults: defaults for keys that config.json may omit.
        rope_theta: default if no key of config.json specifies it.
        activations: accepted names of the activation that is computed.
        computed_keys: keys that are refused for other families and computed for this one.
        rounds_embedding_scale: the factor of embeddings is rounded to the dtype of computation.
        norm_offset: value added to the weights of norms.
        aliases: pairs of the family's own key in config.json and the usual key.
        decoders: by `model_type` of a decoder whose keys are under `text_config`, defaults for its
            keys; empty if the keys are at the top level.
        older_lie_open: older files have the decoder's keys at the top level.
        weight_prefix: name prefix of the decoder's tensors.
        tensor_names: pairs of a part of usual tensor names and the family's part, replaced in
            order.
        derived: returns keys that follow from others and override the file's own.
    """

    configure: Callable[[Fields, ModelConfig], ModelConfig]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rope_theta: float = 10000.0
    activations: tuple[str, ...] = ("silu",)
    computed_keys: frozenset[str] = frozenset()
    rounds_embedding_scale: bool = False
    norm_offset: float = 0.0
    aliases: tuple[tuple[str, str], ...] = ()
    decoders: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    older_lie_open: bool = False
    weight_prefix: str = "model"
    tensor_names: tuple[tuple[str, str], ...] = ()
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None

    def usual_keys(self, raw: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
        """Returns a config.json's keys under their usual names, with defaults.

        Raises:
            CheckpointError: the decoder's keys are missing, or contradict each other.
        """
        defaults = self.defaults
        if self.decoders:
            inner = raw.get("text_config")
            if isinstance(inner, Mapping):
                defaults = {**defaults, **self._decoder_defaults(inner, origin)}
                # Keys of the whole model apply to its decoder.
                raw = {**inner, **{key: value for key, value in raw.items() if value is not None}}
            elif inner is not None or not self.older_lie_open:
                raise CheckpointError(f"{origin}: text_config is missing")
        _refuse_two_ropes(Fields(raw, origin))
        own_names = {usual: raw[own] for own, usual in self.aliases if own in raw}
        usual = {**defaults, **own_names, **raw}
        return usual if self.derived is None else {**usual, **self.derived(usual)}

    def _decoder_defaults(self, inner: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
        key = "model_type of text_config"
        fields = Fields({key: inner.get("model_type")}, origin)
        fields.only(key, *self.decoders)
        name = fields.raw[key]
        return {} if name is None else self.decoders[name]


def _refuse_two_ropes(fields: Fields) -> None:
    """Refuses an old rope key, as added by long-context guides, that contradicts a new one."""
    old, new = fields.table("rope_scaling"), fields.table("rope_parameters")
    if new and any(old[key] != new.get(key) for key in old):
        raise CheckpointError(
            f"{fields.origin}: rope_scaling contradicts rope_parameters; put it into that one"
        )


def uniform_window(fields: Fields, config: ModelConfig) -> tuple[int, ...]:
    """Returns `windows` of a model with the same window in all layers; none if the key is null.

    Raises:
        CheckpointError: the window is malformed.
    """
    if fields.raw.get("sliding_window") is None:
        return config.windows
    return (fields.number("sliding_window", int),) * config.num_layers


def windows_of_types(fields: Fields, types: tuple[str, ...]) -> tuple[int, ...]:
    """Returns `windows` by the type of each layer.

    Raises:
        CheckpointError: a layer has a sliding window whose size is missing.
    """
    if "sliding_attention" not in types:
        return (0,) * len(types)
    window = fields.number("sliding_window", int)
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def types_or_each_nth(fields: Fields, num_layers: int, usual: int) -> tuple[str, ...]:
    """Returns the type of each layer; without a list in the file each n-th has full attention.

    Args:
        usual: n, unless the file has `sliding_window_pattern`.

    Raises:
        CheckpointError: a value is malformed.
    """
    types = fields.layer_types(num_layers)
    if types is not None:
        return types
    every = fields.number("sliding_window_pattern", int, default=usual)
    return tuple(
        "sliding_attention" if (layer + 1) % every else "full_attention"
        for layer in range(num_layers)
    )


def unrotated_without_window(config: ModelConfig) -> ModelConfig:
    """Returns a config in which only layers with a window are rotated."""
    full = frozenset(layer for layer, window in enumerate(config.windows) if not window)
    return replace(config, unrotated=full)


def qwen_windows(fields: Fields, config: ModelConfig) -> tuple[int, ...]:
    """Returns `windows` of Qwen2 and Qwen3: none unless configured, and then in upper layers."""
    if not fields.flag("use_sliding_window"):
        return config.windows
    types = fields.layer_types(config.num_layers)
    if types is not None:
        return windows_of_types(fields, types)
    window = fields.number("sliding_window", int, default=4096)
    lower = min(fields.count("max_window_layers", default=28), config.num_layers)
    return (0,) * lower + (window,) * (config.num_layers - lower)


def qwen_sparse_layers(fields: Fields, config: ModelConfig) -> frozenset[int]:
    """Returns the layers with experts in Qwen's terms: each n-th, except those named as dense.

    Raises:
        CheckpointError: `decoder_sparse_step` or `mlp_only_layers` is malformed.
    """
    dense = fields.numbers("mlp_only_layers")
    every = fields.number("decoder_sparse_step", int, default=1)
    sparse = {layer for layer in range(config.num_layers) if (layer + 1) % every == 0}
    return frozenset(sparse.difference(dense))


def latent_shape(fields: Fields, *, interleaved: bool) -> LatentConfig:
    """Reads the shape of latent attention by its usual keys.

    Raises:
        CheckpointError: a value is malformed or not supported.
    """
    if fields.flag("attention_bias"):
        raise CheckpointError(f"{fields.origin}: attention_bias of latents is not supported")
    # All heads share a latent, so there are no groups of heads.
    fields.only("num_key_value_heads", fields.number("num_attention_heads", int))
    compressed = fields.raw.get("q_lora_rank") is not None
    return LatentConfig(
        query_rank=fields.number("q_lora_rank", int) if compressed else 0,
        rank=fields.number("kv_lora_rank", int, default=512),
        rope_dim=fields.number("qk_rope_head_dim", int, default=64),
        nope_dim=fields.number("qk_nope_head_dim", int, default=128),
        value_dim=fields.number("v_head_dim", int, default=128),
        interleaved=interleaved,
    )


EXPERT_ALIASES = (
    ("model_max_length", "max_position_embeddings"),
    ("moe_renormalize", "norm_topk_prob"),
    ("num_expert_group", "n_group"),
    ("num_experts_per_token", "num_experts_per_tok"),
    ("num_shared_experts", "n_shared_experts"),
)
"""Keys of published files of Kimi Linear and Ling, with transformers' names for them."""


def grouped_experts(
    fields: Fields, num_layers: int, usual: MoeConfig, *, usual_dense: int
) -> MoeConfig:
    """Reads experts in groups, chosen by biased scores.

    Args:
        usual: defaults for keys that config.json omits.
        usual_dense: default number of leading layers without experts.

    Raises:
        CheckpointError: a value is malformed.
    """
    size = fields.number("moe_intermediate_size", int, default=usual.intermediate_size)
    return replace(
        usual,
        num_experts=fields.number("num_experts", int, default=usual.num_experts),
        top_k=fields.number("num_experts_per_tok", int, default=usual.top_k),
        intermediate_size=size,
        normalize=fields.flag("norm_topk_prob", default=usual.normalize),
        sparse_layers=sparse_layers(fields, num_layers, usual_dense),
        shared_size=size * fields.number("n_shared_experts", int, default=1),
        num_groups=fields.number("n_group", int, default=usual.num_groups),
        top_groups=fields.number("topk_group", int, default=usual.top_groups),
        scale=fields.number("routed_scaling_factor", float, default=usual.scale),
    )


def sparse_layers(fields: Fields, num_layers: int, usual_dense: int) -> frozenset[int]:
    """Returns the layers with experts: as listed in the file, or all after the leading dense ones.

    Args:
        usual_dense: default number of leading dense layers.

    Raises:
        CheckpointError: a value is malformed.
    """
    types = fields.names("mlp_layer_types", num_layers)
    if types is None:
        return frozenset(range(fields.count("first_k_dense_replace", usual_dense), num_layers))
    return frozenset(layer for layer, kind in enumerate(types) if kind == "sparse")


def rope_of_windows(fields: Fields, theta: float, older: RopeConfig) -> RopeConfig:
    """Reads the rope of layers with a window, in models whose layer types have their own ropes.

    Args:
        theta: default base.
        older: rope of files without `rope_parameters`.

    Raises:
        CheckpointError: a value is malformed or not supported.
    """
    parameters = fields.table("rope_parameters")
    if not parameters:
        return older
    if not parameters.keys() & {"full_attention", "sliding_attention"}:
        raise CheckpointError(f"{fields.origin}: rope_parameters must be those of each layer type")
    return rope_of(fields, theta, "sliding_attention")


def with_ropes(
    fields: Fields, usual: Mapping[str, Mapping[str, Any]], types: Iterable[str]
) -> Fields:
    """Returns a file's keys with a rope for each of these layer types.

    Args:
        usual: ropes of a file without any.

    Raises:
        CheckpointError: a type has no rope.
    """
    table = fields.table("rope_parameters") or usual
    missing = [kind for kind in types if not isinstance(table.get(kind), Mapping)]
    if missing:
        raise CheckpointError(f"{fields.origin}: rope_parameters without {' and '.join(missing)}")
    return Fields({**fields.raw, "rope_parameters": table}, fields.origin)
