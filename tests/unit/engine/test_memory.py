from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.engine.checkpoint import load_model_config
from kvmesh.engine.memory import (
    MemoryNeed,
    available_bytes,
    memory_needed,
    require_memory,
)
from tests.unit.engine.tiny_checkpoint import tensors, write_checkpoint


def test_need_is_what_the_tensors_take(tmp_path: Path) -> None:
    config = load_model_config(write_checkpoint(tmp_path))
    need = memory_needed(config, dtype="auto", num_blocks=10, block_size=16)
    matrices = sum(tensor.numel() for tensor in tensors().values() if tensor.dim() == 2)
    # The head shares the embedding's values, but has a copy of its own.
    assert need.weights_bytes == (matrices + 64 * 32) * 4
    assert need.kv_bytes == 10 * (2 * 2 * 16 * 2 * 8) * 4
    half = memory_needed(config, dtype="bfloat16", num_blocks=10, block_size=16)
    assert (half.weights_bytes, half.kv_bytes) == (need.weights_bytes // 2, need.kv_bytes // 2)


def test_untied_embeddings_take_as_much_as_tied_ones(tmp_path: Path) -> None:
    tied, untied = (
        memory_needed(
            load_model_config(write_checkpoint(tmp_path / str(tie), tie_word_embeddings=tie)),
            dtype="float32",
            num_blocks=1,
            block_size=16,
        ).weights_bytes
        for tie in (True, False)
    )
    assert untied == tied


def test_refusal_is_one_line_with_the_numbers() -> None:
    need = MemoryNeed(weights_bytes=1 << 30, kv_bytes=2 << 30, work_bytes=1 << 30)
    require_memory(need, need.total_bytes)
    with pytest.raises(ConfigError) as refusal:
        require_memory(need, need.total_bytes - 1)
    assert "needs 4.00 GiB (1.00 weights, 2.00 KV blocks" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_unknown_dtype(tmp_path: Path) -> None:
    config = load_model_config(write_checkpoint(tmp_path))
    with pytest.raises(ConfigError, match="dtype 'int8' is unknown"):
        memory_needed(config, dtype="int8", num_blocks=1, block_size=16)


def test_the_host_has_memory() -> None:
    assert available_bytes() > 1 << 20


def test_a_container_s_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.engine.memory.memory_left", lambda: 5000.0)
    assert available_bytes() == 5000
