"""Flags of `kvmesh profile`. Tests: tests/integration/test_profile_command.py."""

from __future__ import annotations

import argparse
import re

from kvmesh.cli.flags import add_flag, new_parser, output_file, picture_file, positive_int

DESCRIPTION = """\
Measures the costs of a model on this machine: prefill by prompt length and cached length, decode
steps by batch size and context length, memory bandwidth and loopback bandwidth. Fits the costs,
with error bars, and writes a profile for `kvmesh plan` and `kvmesh simulate`. Run it on an idle
machine.

With --url, which `kvmesh up --run` sets, it measures a running stack instead: its workers, how much
they slow each other down on one host, and the costs of gateway and scheduler."""

EXAMPLE = """\
example: kvmesh profile --model models/pydoc-6m --out pydoc.json --plot pydoc.png
         kvmesh simulate --profile pydoc.json --fleet home:cpu:prefill:1,home:cpu:decode:1
         kvmesh up --threads 1 --run 'kvmesh profile --model models/pydoc-6m'"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser with all flags."""
    made = new_parser("kvmesh profile", DESCRIPTION, EXAMPLE)
    add_flag(made, "--model", "", "checkpoint folder", metavar="DIR")
    text = (
        "gateway of a running stack with one prefill and one decode worker, to measure that stack"
    )
    add_flag(made, "--url", "", text, metavar="URL")
    add_flag(
        made,
        "--out",
        "profile.json",
        "file to which the profile is written",
        kind=output_file,
        metavar="FILE",
    )
    add_flag(
        made,
        "--plot",
        "",
        "file to which a plot is written (PNG, SVG or PDF)",
        kind=picture_file,
        metavar="FILE",
    )
    _add_engine_flags(made)
    _add_grid_flags(made)
    return made


def _add_engine_flags(made: argparse.ArgumentParser) -> None:
    add_flag(made, "--device", "cpu", "cpu or cuda")
    add_flag(made, "--dtype", "auto", "auto, float32, float16 or bfloat16")
    add_flag(
        made,
        "--cuda-graphs",
        "auto",
        "as engine.cuda_graphs of a worker: auto, on or off",
        choices=("auto", "on", "off"),
    )
    add_flag(made, "--num-blocks", 1024, "KV blocks", kind=positive_int)
    add_flag(made, "--block-size", 16, "token positions per KV block", kind=positive_int)
    add_flag(made, "--threads", 1, "CPU threads of the engine", kind=positive_int)
    add_flag(made, "--max-batch-tokens", 512, "maximum tokens per step", kind=positive_int)


def _add_grid_flags(made: argparse.ArgumentParser) -> None:
    add_flag(
        made,
        "--lengths",
        "32,64,128,256,512,1024,2048",
        "prompt lengths in tokens, comma-separated",
        kind=numbers,
    )
    add_flag(
        made, "--cached", "0,512", "cached tokens before a prompt, comma-separated", kind=numbers
    )
    add_flag(
        made,
        "--batches",
        "1,2,4,8,16",
        "batch sizes of decode steps, comma-separated",
        kind=numbers,
    )
    add_flag(
        made,
        "--contexts",
        "64,256,1024",
        "context lengths per sequence in tokens, comma-separated",
        kind=numbers,
    )
    add_flag(
        made,
        "--repeats",
        5,
        "measuring rounds; the median of each point counts",
        kind=positive_int,
    )


def numbers(raw: str) -> tuple[int, ...]:
    """Parses whole numbers, comma-separated, and sorts them."""
    if not re.fullmatch(r"\d+(,\d+)*", raw):
        raise argparse.ArgumentTypeError(f"{raw!r} is not a list of numbers like 1,2,4")
    return tuple(sorted({int(each) for each in raw.split(",")}))
