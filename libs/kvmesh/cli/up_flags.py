"""Flags of `kvmesh up`. Tests: tests/unit/cli/test_up.py."""

from __future__ import annotations

import argparse

from kvmesh.cli.flags import (
    add_flag,
    add_switch,
    command_words,
    count,
    new_parser,
    port_number,
    positive,
    positive_int,
)

BLOCK_SIZE = 16
VLLM_BLOCK_SIZE = 32
"""Block size that vLLM's CPU kernels support."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser with all flags; `up.stack_options` fills in dependent defaults."""
    made = new_parser(
        "kvmesh up",
        "Starts Redis, kvmanager, scheduler, prefill and decode workers and a gateway on this\n"
        "machine, waits until they are ready, and restarts processes that end or hang. Ctrl-C\n"
        "stops them all.",
        "examples:\n"
        "  kvmesh up --prefill 2 --decode 2\n"
        "  kvmesh up --remote 1 --link-mbit 200\n"
        "  kvmesh up --engine fake --port 0 --run 'kvmesh bench serve --requests 20'\n\n"
        "exit code: 0 after Ctrl-C, or the exit code of --run; 1 if something failed; 2 wrong\n"
        "usage, or a check failed before any process was started; 130 if Ctrl-C came before the\n"
        "stack was ready, or before --run had ended",
    )
    _add_model_flags(made)
    _add_worker_flags(made)
    _add_address_flags(made)
    _add_engine_flags(made)
    add_flag(made, "--redis-url", "", "URL of a running Redis; default: start one", metavar="URL")
    text = (
        "file with the shared secret of the mesh, for services on other hosts; default: a "
        "new secret"
    )
    add_flag(made, "--secret-file", "", text, metavar="FILE")
    add_flag(
        made,
        "--state-dir",
        "",
        "folder for logs, traces and the stack's state; default: .kvmesh",
        metavar="DIR",
    )
    add_flag(
        made,
        "--start-timeout",
        120.0,
        "maximum seconds until all processes are ready",
        kind=positive,
    )
    text = "run this command when the stack is ready, then stop the stack"
    add_flag(made, "--run", "", text, kind=command_words, metavar="COMMAND")
    text = "stop the stack if a process ends or hangs, instead of restarting it; implied by --run"
    add_switch(made, "--no-restart", text)
    return made


def _add_address_flags(made: argparse.ArgumentParser) -> None:
    add_flag(made, "--host", "127.0.0.1", "address of the HTTP API")
    add_flag(made, "--port", 8000, "port of the HTTP API; 0 picks a free one", kind=port_number)
    text = "port of the gRPC API; 0: the port after --port, or the next free one"
    add_flag(made, "--grpc-port", 0, text, kind=port_number)
    text = "port of the console; 0: the second port after --port, or the next free one"
    add_flag(made, "--console-port", 0, text, kind=port_number)


def _add_engine_flags(made: argparse.ArgumentParser) -> None:
    add_flag(
        made,
        "--engine",
        "kvmesh",
        "engine of the workers; fake computes nothing",
        choices=("kvmesh", "vllm", "fake"),
    )
    text = "processes per worker that share each layer of the model; engine vllm only"
    add_flag(made, "--tensor-parallel", 1, text, kind=positive_int, metavar="N")
    text = "stages of layers per worker, each with --tensor-parallel processes; engine vllm only"
    add_flag(made, "--pipeline-parallel", 1, text, kind=positive_int, metavar="N")
    dtypes = ("auto", "float32", "float16", "bfloat16")
    add_flag(
        made,
        "--dtype",
        "",
        "number format of weights and KV; default: float32 for the embedded model, else auto",
        choices=dtypes,
    )
    text = (
        "device of the engines: cpu, cuda:N, or cuda: engines take devices in turn, one for each "
        "of their ranks"
    )
    add_flag(made, "--device", "cpu", text)
    text = (
        "computing threads per engine; 0: the cores, divided among all engines, or among those "
        "that have work (engine kvmesh on the CPU, 128 MiB of weights or more)"
    )
    add_flag(made, "--threads", 0, text, kind=count)
    add_flag(made, "--num-blocks", 1024, "KV blocks per worker", kind=positive_int)
    text = f"token positions per block; 0: 16, with vllm {VLLM_BLOCK_SIZE}"
    add_flag(made, "--block-size", 0, text, kind=count)
    add_flag(
        made,
        "--max-model-len",
        0,
        "maximum tokens of a sequence, prompt and answer; 0: the limit of model and KV blocks",
        kind=count,
    )


def _add_worker_flags(made: argparse.ArgumentParser) -> None:
    text = "number of prefill workers; 0: the workers of --decode are hybrid and do both"
    add_flag(made, "--prefill", 2, text, kind=count)
    add_flag(made, "--decode", 2, "number of decode workers", kind=positive_int)
    text = "number of spare workers that replace lost ones"
    add_flag(made, "--spare", 0, text, kind=count)
    text = "number of spares that load a model only when they replace a worker"
    add_flag(made, "--empty-spare", 0, text, kind=count)
    text = (
        "number of prefill workers in a second cluster, behind a link of limited "
        "bandwidth; 0: one cluster only"
    )
    add_flag(made, "--remote", 0, text, kind=count)
    text = "bandwidth out of the second cluster, in megabits per second"
    add_flag(made, "--link-mbit", 200, text, kind=positive_int)
    text = "initial threshold: prompts with more uncached tokens go to the second cluster"
    add_flag(made, "--threshold", 512, text, kind=positive_int)


def _add_model_flags(made: argparse.ArgumentParser) -> None:
    text = "model folder, or org/name on the Hugging Face hub; default: the embedded model"
    add_flag(made, "--model", "", text, metavar="MODEL")
    text = "model name that clients use; default: the folder name, or org/name"
    add_flag(made, "--model-name", "", text)
    add_flag(made, "--aliases", "", "additional model names that clients may use, comma-separated")
    text = (
        "further models as NAME=FOLDER, comma-separated; each gets the same number of "
        "workers; repeat a folder to give its model another name"
    )
    add_flag(made, "--other-models", "", text, metavar="MODELS")
    add_flag(made, "--lora", "", "LoRA adapters as NAME=FOLDER, comma-separated; engine vllm only")
    text = (
        "maximum LoRA adapters, for `kvmesh adapter load`; 0: only those of --lora; "
        "engine vllm only"
    )
    add_flag(made, "--max-loras", 0, text, kind=count)
