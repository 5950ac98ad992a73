"""The batch size of a worker's static decode steps, from its config.

Tests: tests/unit/runtime/test_worker_static.py.
"""

from __future__ import annotations

from kvmesh.core.errors import ConfigError
from kvmesh.runtime.worker_config import EngineSection


def static_batch_of(config: EngineSection) -> int:
    """Number of sequences of the largest static decode step; 0 if all steps are plain.

    On the CPU no graph can be captured, and a plain step does less work for the same tokens.

    Raises:
        ConfigError: an unknown word.
    """
    word = config.cuda_graphs
    if word not in {"auto", "on", "off"}:
        raise ConfigError(f"engine.cuda_graphs must be auto, on or off, got {word!r}")
    wanted = config.device != "cpu" if word == "auto" else word == "on"
    return config.max_graph_batch if wanted else 0
