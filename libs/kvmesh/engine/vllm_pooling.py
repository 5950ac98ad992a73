"""Embeddings by vLLM's own pooler, from the hidden states of a model that generates.

vLLM makes the pooler, with the settings and projections of a Sentence Transformers folder, for a
model that it loads for pooling alone. Where that one takes the last token of a causal prompt, its
hidden state is the same as of the model that generates, so one worker does both.

Tests: tests/vllm/test_embeddings.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.pooler.seqwise.poolers import SequencePooler, pooler_for_embed
from vllm.pooling_params import PoolingParams
from vllm.v1.pool.metadata import PoolingMetadata, PoolingStates

from kvmesh.engine.protocol import EmbeddingSpec
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)

POOLED = frozenset(
    {
        "prompt_lens",
        "prompt_token_ids",
        "prompt_token_ids_cpu",
        "pooling_params",
        "pooling_states",
    }
)
"""The fields of `PoolingMetadata` that we fill."""


class Pooling:
    """The pooler of a model."""

    def __init__(self, model: ModelConfig, pooler: SequencePooler) -> None:
        self._model = model
        self._pooler = pooler
        size = int(model.embedding_size)
        shorter: Sequence[int] = ()
        if model.is_matryoshka:
            shorter = range(1, size)
            if model.matryoshka_dimensions is not None:
                shorter = tuple(each for each in model.matryoshka_dimensions if each < size)
        self.spec = EmbeddingSpec(size, shorter)

    @classmethod
    def of(cls, config: VllmConfig, arguments: EngineArgs) -> Pooling | None:
        """The pooler of a loaded model; None if its embeddings need another computation.

        Args:
            config: of the model as it is loaded, to generate.
            arguments: those that the configuration was made from.
        """
        pooling = replace(arguments, runner="pooling", convert="embed")
        try:
            model = pooling.create_model_config()
        except ValueError as error:  # vLLM cannot use every model for pooling
            log.info("no_embeddings", reason=str(error))
            return None
        assert model.pooler_config is not None, "a model for pooling has it"
        kind = model.pooler_config.get_seq_pooling_type()
        if kind != "LAST" or model.attn_type != "decoder":
            log.info("no_embeddings", reason=f"{kind} pooling, attention {model.attn_type}")
            return None
        of_pooling = copy.copy(config)
        of_pooling.model_config = model
        with set_current_vllm_config(of_pooling):
            pooler = pooler_for_embed(model.pooler_config)
        return cls(model, pooler.eval())

    def embed(self, hidden: Tensor, dimensions: Sequence[int]) -> list[Tensor]:
        """The embeddings of some prompts.

        Args:
            hidden: [prompts, width] of the last token of each, in the model's dtype.
            dimensions: number of leading dimensions of each; 0: all.

        Returns:
            For each prompt [dimensions] float32.
        """
        ones = torch.ones(len(dimensions), dtype=torch.int32)
        metadata = PoolingMetadata(
            prompt_lens=ones,
            prompt_token_ids=None,
            prompt_token_ids_cpu=None,
            pooling_params=[self._params(each) for each in dimensions],
            pooling_states=[PoolingStates() for _ in dimensions],
        )
        metadata.build_pooling_cursor(np.ones(len(dimensions), np.int32), ones, hidden.device)
        return [each.float().cpu() for each in self._pooler(hidden, metadata)]

    def _params(self, dimensions: int) -> PoolingParams:
        # vLLM takes a number of dimensions only from models that were trained for several.
        wanted = dimensions if dimensions in self.spec.shorter else None
        params = PoolingParams(task="embed", dimensions=wanted)
        params.verify(self._model)  # fills in the defaults of the model
        return params
