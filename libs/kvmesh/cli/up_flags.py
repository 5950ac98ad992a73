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
        "machine, waits until they are ready, replaces those that end or hang, and stops them all\n"
        "on Ctrl-C.",
        "examples:\n"
        "  kvmesh up --prefill 2 --decode 2\n"
        "  kvmesh up --remote 1 --link-mbit 200\n"
        "  kvmesh up --engine fake --port 0 --run 'kvmesh bench serve --requests 20'\n\n"
        "exit code: 0 after Ctrl-C, or that of --run; 1 if something failed; 130 if it was\n"
        "stopped before it was ready, or before --run had ended; 2 wrong usage, or something\n"
        "was wrong before any process was started",
    )
    _add_model_flags(made)
    _add_worker_flags(made)
    add_flag(made, "--host", "127.0.0.1", "address of the HTTP API")
    add_flag(made, "--port", 8000, "port of the HTTP API; 0: a free one", kind=port_number)
    text = "port of the gRPC API; 0: the one after --port, or the next free one"
    add_flag(made, "--grpc-port", 0, text, kind=port_number)
    text = "port of the console; 0: the second after --port, or the next free one"
    add_flag(made, "--console-port", 0, text, kind=port_number)
    add_flag(made, "--engine", "kvmesh", "what computes", choices=("kvmesh", "vllm", "fake"))
    text = "processes that share each layer of a worker's model; engine vllm"
    add_flag(made, "--tensor-parallel", 1, text, kind=positive_int, metavar="N")
    text = "parts that the layers are divided into, each with as many processes; engine vllm"
    add_flag(made, "--pipeline-parallel", 1, text, kind=positive_int, metavar="N")
    dtypes = ("auto", "float32", "float16", "bfloat16")
    add_flag(made, "--dtype", "", "default: float32 for the embedded model", choices=dtypes)
    add_flag(made, "--device", "cpu", "cpu, cuda or cuda:N")
    add_flag(made, "--num-blocks", 1024, "KV blocks per engine", kind=positive_int)
    text = f"token positions per block; 0: 16, with vllm {VLLM_BLOCK_SIZE}"
    add_flag(made, "--block-size", 0, text, kind=count)
    add_flag(
        made,
        "--max-model-len",
        0,
        "longest sequence in tokens; 0: what model and blocks allow",
        kind=count,
    )
    add_flag(made, "--redis-url", "", "a running Redis; default: start one", metavar="URL")
    text = "the mesh's secret, shared with services elsewhere; default: a new one"
    add_flag(made, "--secret-file", "", text, metavar="FILE")
    add_flag(made, "--state-dir", "", "logs and traces; default: .kvmesh", metavar="DIR")
    add_flag(made, "--start-timeout", 120.0, "seconds until all must be ready", kind=positive)
    text = "run this when ready, then stop"
    add_flag(made, "--run", "", text, kind=command_words, metavar="COMMAND")
    text = "end with the first process that ends or hangs; implied by --run"
    add_switch(made, "--no-restart", text)
    return made


def _add_worker_flags(made: argparse.ArgumentParser) -> None:
    text = "prefill workers; 0: those of --decode are hybrid and do both"
    add_flag(made, "--prefill", 2, text, kind=count)
    add_flag(made, "--decode", 2, "decode workers", kind=positive_int)
    text = "workers that wait for the place of one that is lost"
    add_flag(made, "--spare", 0, text, kind=count)
    text = "spares that load a model only when one is to be replaced"
    add_flag(made, "--empty-spare", 0, text, kind=count)
    text = "prefill workers of a second cluster behind a paced link; 0: one cluster"
    add_flag(made, "--remote", 0, text, kind=count)
    text = "megabits per second that leave the second cluster"
    add_flag(made, "--link-mbit", 200, text, kind=positive_int)
    text = "uncached tokens above which prompts go to the second cluster at first"
    add_flag(made, "--threshold", 512, text, kind=positive_int)


def _add_model_flags(made: argparse.ArgumentParser) -> None:
    text = "model folder, or org/name on the Hugging Face hub; default: the embedded model"
    add_flag(made, "--model", "", text, metavar="MODEL")
    text = "name that clients use; default: name of the folder, or org/name"
    add_flag(made, "--model-name", "", text)
    add_flag(made, "--aliases", "", "further names that clients may use, comma-separated")
    text = (
        "further models as NAME=FOLDER, comma-separated; each has as many workers of its own; a "
        "folder that comes again gives its model one more name"
    )
    add_flag(made, "--other-models", "", text, metavar="MODELS")
    add_flag(made, "--lora", "", "LoRA adapters as NAME=FOLDER, comma-separated; engine vllm")
    text = "LoRA adapters at once, for `kvmesh adapter load`; 0: those of --lora; engine vllm"
    add_flag(made, "--max-loras", 0, text, kind=count)
