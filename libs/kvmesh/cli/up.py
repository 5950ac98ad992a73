"""`kvmesh up`: runs a whole stack on this machine. Tests: tests/unit/cli/test_up.py."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from kvmesh.cli.descendants import adopt_orphans, kill_descendants
from kvmesh.cli.launcher import FAILED, PORT_TAKEN, LaunchSettings, StackRunner
from kvmesh.cli.machine_checks import native_notes
from kvmesh.cli.model_folder import embedded_models
from kvmesh.cli.preflight import (
    Room,
    free_disk_bytes,
    free_memory_bytes,
    machine_problems,
    model_problems,
)
from kvmesh.cli.probes import free_ports, is_free
from kvmesh.cli.processes import Supervisor
from kvmesh.cli.ready_command import command_problems
from kvmesh.cli.stack import (
    OtherModel,
    RemoteOptions,
    StackOptions,
    StackPaths,
    engine_environment,
    engine_threads,
    plan_stack,
)
from kvmesh.cli.stack_ports import ApiPorts, api_ports
from kvmesh.cli.stack_secrets import StackSecrets, stack_secrets
from kvmesh.cli.stack_state import (
    CHECKOUT,
    DEFAULT_STATE,
    held_by_another,
    hold_state,
    is_checkout,
    is_held,
)
from kvmesh.cli.stop_signals import StopSignals
from kvmesh.cli.up_flags import BLOCK_SIZE, VLLM_BLOCK_SIZE
from kvmesh.cli.up_flags import parser as flags_parser
from kvmesh.core.clock import SystemClock
from kvmesh.core.config import child_environment, environment
from kvmesh.core.cores import usable_cores
from kvmesh.core.errors import CheckpointError, ConfigError
from kvmesh.core.named_values import listed, named_values
from kvmesh.core.types import Endpoint
from kvmesh.engine.adapters import read_adapters
from kvmesh.engine.checkpoint import load_model_config
from kvmesh.engine.model_source import find_model, is_hub_name, served_name
from kvmesh.engine.vllm_check import read_vllm_model
from kvmesh.metadata.server_binary import find_redis_binary

_LOCAL = "127.0.0.1"
_PORTS_PER_MEMBER = 2
_ADMIN_PORTS = 3  # including the launcher's
_DRAIN_S = 5.0
_GRACE_S = 10.0

USAGE_ERROR = 2
"""Exit code if a problem was found before any process was started."""


def _default_model() -> Path:
    found = embedded_models(CHECKOUT)
    if not found:
        raise ConfigError(f"{CHECKOUT}/models holds no model; name a model folder with --model")
    return found[0]


def stack_options(arguments: argparse.Namespace, ports: ApiPorts, cores: int) -> StackOptions:
    """Returns the stack to start, with all defaults filled in.

    Raises:
        ConfigError: no model was named and none is embedded, or adapters or other models are
            malformed.
        CheckpointError: an adapter does not exist.
    """
    embedded = not arguments.model
    if embedded:
        model = _default_model()
    else:
        named = is_hub_name(arguments.model)
        model = Path(arguments.model) if named else Path(arguments.model).resolve()
    model_name = arguments.model_name or served_name(str(model))
    others = _other_models(arguments, model_name)
    default_block_size = VLLM_BLOCK_SIZE if arguments.engine == "vllm" else BLOCK_SIZE
    is_ours = (arguments.engine, arguments.device, sys.platform) == ("kvmesh", "cpu", "linux")
    return StackOptions(
        model=model,
        model_name=model_name,
        num_prefill=arguments.prefill,
        num_decode=arguments.decode,
        host=arguments.host,
        http_port=arguments.port,
        engine=arguments.engine,
        # The embedded model is small, so float32 is fast enough and gives equal tokens everywhere.
        dtype=arguments.dtype or ("float32" if embedded else "auto"),
        device=arguments.device,
        num_blocks=arguments.num_blocks,
        block_size=arguments.block_size or default_block_size,
        max_model_len=arguments.max_model_len,
        num_threads=arguments.threads
        or engine_threads(
            cores,
            ((1 + len(others)) * (arguments.prefill + arguments.decode) + arguments.remote)
            * arguments.tensor_parallel
            * arguments.pipeline_parallel,
        ),
        shares_cores=is_ours and not arguments.threads,
        redis_url=arguments.redis_url,
        drain_s=_DRAIN_S,
        console_port=ports.console,
        grpc_port=ports.grpc,
        remote=RemoteOptions(arguments.remote, arguments.link_mbit, arguments.threshold)
        if arguments.remote
        else None,
        num_spare=arguments.spare,
        num_empty=arguments.empty_spare,
        aliases=arguments.aliases,
        lora=_adapters(arguments.lora, arguments.engine),
        max_loras=_places(arguments.max_loras, arguments.engine),
        tensor_parallel=_ranks(arguments, "--tensor-parallel"),
        pipeline_parallel=_ranks(arguments, "--pipeline-parallel"),
        others=others,
    )


def _other_models(arguments: argparse.Namespace, first: str) -> tuple[OtherModel, ...]:
    """Returns the further models; they may not use the first model's name or aliases."""
    named = named_values(arguments.other_models, "--other-models", "NAME=FOLDER")
    taken = {first, *listed(arguments.aliases)}
    if twice := sorted(taken & set(named)):
        raise ConfigError(f"--other-models: the first model has the name {', '.join(twice)}")
    names: dict[str, list[str]] = {}
    for name, model in named.items():
        folder = model if is_hub_name(model) else str(Path(model).resolve())
        names.setdefault(folder, []).append(name)
    dtype, longest = arguments.dtype or "auto", arguments.max_model_len
    return tuple(
        OtherModel(tuple(own), Path(folder), dtype, longest) for folder, own in names.items()
    )


def _adapters(text: str, engine: str) -> str:
    """Returns the adapters with absolute folders, valid wherever a worker starts."""
    if text and engine == "kvmesh":
        raise ConfigError("--lora: only --engine vllm serves adapters")
    return ",".join(f"{each.name}={each.folder}" for each in read_adapters(text))


def _places(count: int, engine: str) -> int:
    if count and engine == "kvmesh":
        raise ConfigError("--max-loras: only --engine vllm serves adapters")
    return count


def _ranks(arguments: argparse.Namespace, flag: str) -> int:
    count: int = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
    if count > 1 and arguments.engine != "vllm":
        raise ConfigError(f"{flag}: only --engine vllm runs several ranks")
    return count


def _next_port(options: StackOptions) -> Callable[[], int]:
    num_members = options.num_workers + 4
    api = {options.http_port, options.grpc_port, options.console_port}
    # All taken at once, so that they differ.
    count = _PORTS_PER_MEMBER * num_members + _ADMIN_PORTS + len(api)
    planned = (port for port in free_ports(_LOCAL, count) if port not in api)
    # Then ports for workers that are started later.
    ports = itertools.chain(planned, (free_ports(_LOCAL, 1)[0] for _ in itertools.count()))
    return lambda: next(ports)


def _with_free_ports(options: StackOptions) -> StackOptions:
    """Replaces gRPC and console ports that another program took meanwhile by free ones."""
    grpc, console = (
        port if is_free(Endpoint(_LOCAL, port)) else 0
        for port in (options.grpc_port, options.console_port)
    )
    return dataclasses.replace(options, grpc_port=grpc, console_port=console)


async def _run(
    options: StackOptions,
    paths: StackPaths,
    secrets: StackSecrets,
    settings: LaunchSettings,
    signals: StopSignals,
) -> int:
    console = Console()
    env = child_environment(engine_environment(options.num_threads))
    code = PORT_TAKEN
    for _ in range(2):  # another program may take a port between planning and starting
        options = _with_free_ports(options)
        plan = plan_stack(options, paths, _next_port(options), env, secrets)
        supervisor = Supervisor(_GRACE_S)
        signals.attach(supervisor.hurry)
        runner = StackRunner(plan, paths, supervisor, console, settings, SystemClock())
        code = await runner.run(signals.asked)
        if code != PORT_TAKEN:
            return code
    return FAILED


def main(argv: Sequence[str]) -> int:
    """Runs a stack and returns the exit code.

    With `--run` it is that of the command, else 0 after Ctrl-C. 130: Ctrl-C came before the stack
    was ready or its command had ended. 2: a problem was found before any process was started. 1:
    the stack could not start, or a process was given up.
    """
    arguments = flags_parser().parse_args(argv)
    try:
        options, paths, notes = _planned(arguments)
        settings = LaunchSettings(
            # A measurement or test with --run must not hide that a process died.
            restart=not (arguments.no_restart or arguments.run),
            start_timeout_s=arguments.start_timeout,
            command=arguments.run,
            has_keys=_has_keys(),
        )
        with hold_state(paths.state), stack_secrets(paths.state, arguments.secret_file) as secrets:
            for note in notes:
                print(f"kvmesh up: {note}", file=sys.stderr)
            return _run_held(options, paths, secrets, settings)
    except (ConfigError, CheckpointError) as error:
        for line in str(error).split("\n"):
            print(f"kvmesh up: {line}", file=sys.stderr)
        return USAGE_ERROR


def _planned(arguments: argparse.Namespace) -> tuple[StackOptions, StackPaths, list[str]]:
    """Returns the stack to start, its paths, and notes for the user; its models are local now.

    Raises:
        ConfigError: it cannot be started; one line per reason.
        CheckpointError: the model was not found.
    """
    if not is_checkout(CHECKOUT):
        raise ConfigError(
            f"{CHECKOUT} is not a checkout of the repository, which the services need; clone the "
            "repository, and run this command in its root"
        )
    ports = api_ports(arguments.port, arguments.grpc_port, arguments.console_port)
    options = stack_options(arguments, ports, usable_cores())
    state = Path(arguments.state_dir).resolve() if arguments.state_dir else DEFAULT_STATE
    paths = StackPaths(CHECKOUT, state, Path(sys.executable), find_redis_binary())
    if is_held(state):
        raise ConfigError(held_by_another(state))
    room = Room(free_memory_bytes(), free_disk_bytes(state))
    found = machine_problems(options, paths, room) + command_problems(arguments.run)
    if not (found and is_hub_name(str(options.model))):  # no useless download
        options = _with_folders(options)
        found += model_problems(options, room)
    if found:
        raise ConfigError("\n".join(found))
    if not options.max_model_len:
        options = _with_lengths(options)
    return options, paths, [*ports.notes, *native_notes(options.engine, options.device)]


def _with_folders(options: StackOptions) -> StackOptions:
    """Returns the options with local folders of all models; downloads them if needed.

    Raises:
        CheckpointError: a model was not found.
    """

    def folder(model: Path) -> Path:
        is_ours = options.engine != "vllm"
        return find_model(str(model), has_weights=options.engine != "fake", is_ours=is_ours)

    others = [dataclasses.replace(each, folder=folder(each.folder)) for each in options.others]
    return dataclasses.replace(options, model=folder(options.model), others=tuple(others))


def _with_lengths(options: StackOptions) -> StackOptions:
    """Returns the options with the longest sequence that each model and its blocks allow."""

    def longest(model: Path) -> int:
        return min(_max_positions(options.engine, model), options.num_blocks * options.block_size)

    others = [
        dataclasses.replace(each, max_model_len=longest(each.folder)) for each in options.others
    ]
    return dataclasses.replace(options, max_model_len=longest(options.model), others=tuple(others))


def _max_positions(engine: str, model: Path) -> int:
    """Returns the longest sequence that a model supports."""
    if engine == "vllm":
        return read_vllm_model(model).max_positions
    return load_model_config(model).max_position_embeddings


def _run_held(
    options: StackOptions, paths: StackPaths, secrets: StackSecrets, settings: LaunchSettings
) -> int:
    _prepare(paths.state)
    signals = StopSignals()
    adopt_orphans()
    try:
        return asyncio.run(_run(options, paths, secrets, settings, signals))
    finally:
        kill_descendants()


def _has_keys() -> bool:
    """Whether the environment configures the gateway to require API keys."""
    in_redis = environment("KVMESH_ACCESS__TENANTS_IN_REDIS").lower() in ("true", "1", "yes", "on")
    names = ("API_KEYS", "API_KEYS_FILE", "TENANTS_FILE")
    return in_redis or any(environment(f"KVMESH_ACCESS__{name}") for name in names)


def _prepare(state: Path) -> None:
    """Creates the folders and removes earlier traces; logs start over by themselves."""
    for folder in (state / "logs", state / "traces"):
        folder.mkdir(parents=True, exist_ok=True)
    for trace in (state / "traces").glob("*.jsonl"):
        trace.unlink()
