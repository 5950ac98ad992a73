"""vLLM in a test's own process, where it is installed."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from kvmesh.core.config import default_environment
from kvmesh.core.mesh_secret import new_secret
from kvmesh.engine.adapters import read_adapters
from kvmesh.engine.rank_host import Builds, RankHost
from kvmesh.engine.rank_join import Credentials, Join
from kvmesh.engine.rank_lines import RankGate
from kvmesh.engine.vllm_check import engine_environment, installation_problems
from kvmesh.engine.vllm_messages import EngineRequest
from kvmesh.rpc.channels import PeerTls
from tests.device_twin import twin_driver
from tests.unit.engine.tiny_checkpoint import tensors, write_checkpoint

if TYPE_CHECKING:
    from kvmesh.engine.vllm_runner import VllmRunner

BLOCK_SIZE = 32
_PROBLEMS = installation_problems()

TWIN_FOLLOWER = (sys.executable, "-m", "tests.vllm.twin_follower")

needs_vllm = pytest.mark.skipif(bool(_PROBLEMS), reason="; ".join(_PROBLEMS))
"""For tests that load vLLM; `make e2e-vllm` runs them where it is."""


def write_vllm_checkpoint(folder: Path, **config: Any) -> Path:
    """A tiny random checkpoint whose heads are of a size that vLLM computes."""
    write_checkpoint(folder, head_dim=32, max_position_embeddings=1024, **config)
    save_file(tensors(head_dim=32), folder / "model.safetensors")
    return folder


def write_adapter(
    folder: Path,
    seed: int,
    *,
    hidden: int,
    queries: int,
    values: int,
    layers: int,
    rank: int = 4,
) -> Path:
    """A random LoRA adapter of all layers' queries, values and outputs, as PEFT writes one.

    Args:
        hidden, queries, values: widths of the model and of what its projections give.
    """
    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    # Several ranks share the first two by what they give, and the last one by what it takes.
    sizes = {"q_proj": (hidden, queries), "v_proj": (hidden, values), "o_proj": (queries, hidden)}
    for layer in range(layers):
        for name, (taken, given) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, taken, generator=draw)
            weights[f"{prefix}.lora_B.weight"] = torch.randn(given, rank, generator=draw)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2,
        "target_modules": list(sizes),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def load_vllm(
    folder: Path,
    *,
    num_blocks: int,
    dtype: str,
    block_size: int = BLOCK_SIZE,
    max_tokens: int = 512,
    lora: str = "",
    max_adapters: int = 0,
    ranks: int = 1,
    stages: int = 1,
    spin: bool = False,
    on_devices: bool = False,
    hosts: int = 1,
    gate: RankGate | None = None,
) -> VllmRunner:
    """The runner, each rank on one thread.

    Args:
        ranks: of all stages.
        on_devices: each rank keeps its KV on a device, imitated in host memory.
        hosts: each has as many ranks.
        gate: where other hosts connect; None: they are threads of this process.
    """
    default_environment(engine_environment(1))
    from kvmesh.engine.vllm_runner import VllmRunner

    request = EngineRequest(
        folder=folder,
        dtype=dtype,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=0,
        max_tokens=max_tokens,
        max_sequences=64,
        adapters=read_adapters(lora),
        max_adapters=max_adapters,
        max_adapter_rank=16 if max_adapters else 0,
        num_ranks=ranks,
        num_stages=stages,
        spin=spin,
        device=0 if on_devices else None,
        num_hosts=hosts,
    )
    if hosts > 1 and gate is None:
        gate = _gate_of(request)
    return VllmRunner.load(
        request, "tiny", make_driver=twin_driver, follower=TWIN_FOLLOWER, gate=gate
    )


def _gate_of(request: EngineRequest) -> RankGate:
    """Where hosts dial that begin here."""
    shown, builds = Credentials(PeerTls(), secret=new_secret()), Builds.of(request.folder)
    gate = RankGate(
        "127.0.0.1",
        0,
        shown.access(),
        num_hosts=request.num_hosts,
        host_ranks=request.host_ranks,
        told=asdict(builds),
    )
    for number in range(1, request.num_hosts):
        join = Join("127.0.0.1", gate.port, 0, request.folder, request.device, shown)
        host = RankHost(number, join, builds, command=TWIN_FOLLOWER)
        threading.Thread(target=host.run, daemon=True).start()
    return gate
