"""What benchmarks of single worker processes share: their options, checkpoints, and results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.random_llama import SHAPES, write_checkpoint
from benchmarks.result import RESULTS, Row, Target, document, markdown, save


def parser_of(description: str | None, name: str, repeats: int = 2) -> argparse.ArgumentParser:
    """Options of every such benchmark.

    Args:
        name: of its results.
        repeats: of each measurement, unless said otherwise.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shape", default="110M", choices=tuple(SHAPES))
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, default=RESULTS / f"{name}.json")
    return parser


def checkpoint(shape: str, folder: Path, seed: int, max_tokens: int) -> Path:
    """A random Llama whose context takes so many tokens."""
    written = write_checkpoint(SHAPES[shape], folder, seed)
    path = written / "config.json"
    config = json.loads(path.read_text())
    config["max_position_embeddings"] = max_tokens
    path.write_text(json.dumps(config))
    return written


def publish(
    rows: Sequence[Row], targets: Sequence[Target], options: argparse.Namespace, about: list[str]
) -> None:
    """Writes rows and targets where the options say, and prints them."""
    result = document(list(rows), list(targets), options.seed, about)
    save(result, options.save)
    sys.stdout.write(markdown(result))
