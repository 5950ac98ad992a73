"""Makes a worker's engine from its config: our engine or vLLM with a checkpoint, or the fake.

Tests: tests/unit/runtime/test_worker_runner.py, tests/unit/runtime/test_worker_static.py,
tests/unit/engine/test_step_times.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from kvmesh.core.config import default_environment, environment
from kvmesh.core.cores import usable_cores
from kvmesh.core.errors import ConfigError
from kvmesh.engine.adapters import read_adapters
from kvmesh.engine.checkpoint import load_model_config
from kvmesh.engine.device_names import device_index, require_named_device
from kvmesh.engine.fake import FakeDevice, FakePlaces, FakeRunner
from kvmesh.engine.model_source import find_model, served_name
from kvmesh.engine.protocol import ModelRunner
from kvmesh.engine.rank_lines import RankGate
from kvmesh.engine.shared_cores import SharedCores
from kvmesh.engine.step_times import load_step_times
from kvmesh.engine.vllm_check import engine_environment, require_vllm
from kvmesh.engine.warm_up import first_step, warm_up
from kvmesh.engine.weight_files import check_weight_files, find_weight_files
from kvmesh.policy.batching import BatchLimits
from kvmesh.runtime.worker_config import EngineSection
from kvmesh.runtime.worker_static import static_batch_of
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)

_LOOKS = "300"
"""Number of spins of an OpenMP thread before it sleeps, about 10 us in all.

OpenMP reads it when torch is loaded. A thread that slept at once would be woken a hundred times per
step. OpenMP's own 300000 spins keep a shared core from the threads that are waited for.
"""


LEAST_SHARED_BYTES = 128 << 20
"""Bytes of weights from which an engine uses the cores of idle ones.

Steps of smaller models take a millisecond or two, in which a team of threads waits for the one
whose core also serves gateway and scheduler. On two cores, tokens of 24 MB of weights took 1.3 to
1.7 times as long as with one thread; prompts of 440 MB took 0.6 times as long.
"""


def find_folder(config: EngineSection) -> Path | None:
    """Finds the folder of a worker's model, which may be downloaded; None for a fake without one.

    It reports errors before torch is loaded, which takes seconds.

    Raises:
        ConfigError: an unknown kind, no such device, or no model is named.
        CheckpointError: the model does not exist, is damaged or not supported.
    """
    if (config.lora or config.max_loras) and config.kind == "kvmesh":
        which = (
            "engine.lora names adapters" if config.lora else "engine.max_loras asks for adapters"
        )
        raise ConfigError(
            f"{which}, and the engine {config.kind} has none: set engine.kind vllm, or merge the "
            "adapter into the checkpoint (merge_and_unload of PEFT)"
        )
    for name in ("tensor_parallel", "pipeline_parallel"):
        if (ranks := getattr(config, name)) > 1 and config.kind != "vllm":
            raise ConfigError(
                f"engine.{name} is {ranks}, and the engine {config.kind} is one process: set "
                "engine.kind vllm"
            )
    if config.num_ranks % config.hosts or (config.hosts > 1 and config.kind != "vllm"):
        raise ConfigError(
            f"engine.hosts is {config.hosts}, and {config.num_ranks} ranks of the engine "
            f"{config.kind} are not to be divided among them: with engine.kind vllm, each host has "
            "an equal part of tensor_parallel x pipeline_parallel"
        )
    if config.max_loras < 0:
        raise ConfigError(f"engine.max_loras is a number of adapters, got {config.max_loras}")
    if config.kind == "fake":
        return find_model(config.model, has_weights=False) if config.model else None
    if config.kind not in {"kvmesh", "vllm"}:
        raise ConfigError(f"engine.kind must be kvmesh, vllm or fake, got {config.kind!r}")
    if not config.model:
        raise ConfigError("engine.model is empty: name a checkpoint folder with --engine.model")
    require_named_device(config.device)
    if config.kind == "vllm":
        folder = find_model(config.model, is_ours=False)
        require_vllm(
            folder,
            device=config.device,
            block_size=config.block_size,
            tensor_parallel=config.tensor_parallel,
            num_stages=config.pipeline_parallel,
            num_hosts=config.hosts,
        )
        read_adapters(config.lora)
        return folder
    folder = find_model(config.model)
    load_model_config(folder)
    check_weight_files(folder)
    return folder


def preload(config: EngineSection) -> None:
    """Imports what the engine needs for any model. Takes seconds: call it in a thread."""
    if config.kind != "kvmesh":
        return  # vLLM is imported by a process for each model
    if not environment("OMP_WAIT_POLICY"):
        default_environment({"GOMP_SPINCOUNT": _LOOKS})
    # Only a worker with the real engine imports torch, which is expensive.
    import kvmesh.engine.runner  # noqa: F401, PLC0415


def load_runner(
    config: EngineSection, folder: Path | None = None, gate: RankGate | None = None
) -> ModelRunner:
    """Loads the checkpoint, or makes the fake. Takes seconds: call it in a thread.

    Args:
        folder: from `find_folder`; None finds it here.
        gate: where other hosts of the engine connect; None: there are none.

    Raises:
        ConfigError: an option cannot be met.
        CheckpointError: the folder cannot be loaded.
    """
    folder = folder or find_folder(config)
    name = config.model_name or served_name(config.model) or "fake"
    if folder is None or config.kind == "fake":
        fake = _load_fake(config, folder, name)
        first_step(fake)
        return fake
    threads = config.num_threads * config.host_ranks
    if threads > (cores := usable_cores()):
        log.warning("more_threads_than_cores", threads=threads, cores=cores)
    if config.kind == "vllm":
        return _load_vllm(config, folder, name, gate)
    preload(config)
    from kvmesh.engine.runner import TorchRunner  # noqa: PLC0415

    static_batch = static_batch_of(config)
    runner = TorchRunner.load(
        folder,
        served_name=name,
        device=config.device,
        dtype=config.dtype,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_model_len=config.max_model_len or None,
        num_threads=config.num_threads,
    )
    if config.device == "cpu":
        first_step(runner)
    else:
        # Before static steps are used: the warm-up would compute its one-token steps statically.
        warm_up(runner, config.max_batch_tokens)
    runner.use_static_steps(static_batch)
    return runner


def shared_cores(config: EngineSection, folder: Path | None) -> SharedCores | None:
    """Returns the engine's part of the machine's cores; None: its threads are fixed.

    Args:
        folder: of the checkpoint.

    Raises:
        ConfigError: the file cannot be locked, or the engine has threads of its own.
    """
    if not config.cores_file:
        return None
    if config.kind != "kvmesh" or config.device != "cpu":
        raise ConfigError("engine.cores_file is for engine kvmesh on the CPU; leave it empty")
    if folder is None or _weight_bytes(folder) < LEAST_SHARED_BYTES:
        return None
    import torch  # noqa: PLC0415

    return SharedCores(Path(config.cores_file), usable_cores(), torch.set_num_threads)


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in find_weight_files(folder))


def _load_vllm(
    config: EngineSection, folder: Path, name: str, gate: RankGate | None
) -> ModelRunner:
    default_environment(engine_environment(config.num_threads, config.device))
    # vLLM reads its environment when it is loaded.
    from kvmesh.engine.host_memory import HostMemory  # noqa: PLC0415
    from kvmesh.engine.move_check import require_moves  # noqa: PLC0415
    from kvmesh.engine.vllm_messages import EngineRequest  # noqa: PLC0415
    from kvmesh.engine.vllm_runner import VllmRunner  # noqa: PLC0415

    index = device_index(config.device)
    request = EngineRequest(
        folder=folder,
        dtype=config.dtype,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        max_tokens=config.max_batch_tokens,
        max_sequences=BatchLimits().max_sequences,
        adapters=read_adapters(config.lora),
        max_adapters=config.max_loras,
        max_adapter_rank=config.max_lora_rank if config.max_loras else 0,
        num_ranks=config.num_ranks,
        num_stages=config.pipeline_parallel,
        # The event loop, which answers peers, needs a core too.
        spin=config.hosts == 1 and usable_cores() > config.num_ranks * config.num_threads,
        graphs=index is not None and config.cuda_graphs != "off",
        device=index,
        num_hosts=config.hosts,
    )
    runner = VllmRunner.load(request, name, gate=gate)
    if not isinstance(runner.kv, HostMemory):
        require_moves(runner, runner.kv, config.max_batch_tokens)
    return runner


def _load_fake(config: EngineSection, folder: Path | None, name: str) -> FakeRunner:
    if config.fake_token_bytes < 8 or config.fake_token_bytes % 8:
        raise ConfigError("engine.fake_token_bytes is a multiple of 8, at least 8")
    times = None
    if config.fake_profile:
        times = load_step_times(Path(config.fake_profile), config.fake_device)
    adapters = read_adapters(config.lora)
    num_places = max(config.max_loras, len(adapters))
    longest = max(config.max_lora_rank, *(each.rank for each in adapters), 0)
    places = FakePlaces(num_places, longest, adapters) if num_places else None
    make = FakeRunner if folder is None else partial(FakeRunner.for_checkpoint, folder)
    return make(
        name=name,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        device=FakeDevice(config.fake_step_s, times, config.fake_token_bytes, places),
    )
