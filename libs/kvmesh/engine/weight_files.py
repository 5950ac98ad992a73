"""Finds the weight files of a checkpoint folder and checks that they are complete. Torch-free.

Tests: tests/unit/engine/test_weight_files.py, tests/unit/engine/test_hostile_checkpoint.py.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors

from kvmesh.core.errors import CheckpointError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_COMPUTED = frozenset({"F64", "F32", "F16", "BF16"})
_MASKS = frozenset({"BOOL", "U8", "I64", "I32"})
"""Dtypes of tensors that older files hold beside weights, such as masks; nothing reads them."""

_LONGEST_HEADER = 100_000_000
"""Maximum bytes of a safetensors header, the library's own limit."""

_SAMPLE_BYTES = 4096
_SAMPLES_PER_FILE = 16

_POINTER = b"version https://git-lfs"


def find_weight_files(folder: Path) -> tuple[Path, ...]:
    """Returns the safetensors files that make up the model, sorted by name.

    Raises:
        CheckpointError: a file is missing or malformed; the message names it.
    """
    names = weight_file_names(folder)
    if not names:
        raise CheckpointError(
            f"{folder}: neither {_SINGLE} nor {_INDEX} is there; {_other_weights(folder)}"
        )
    paths = tuple(folder / name for name in names)
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: missing weight files: {', '.join(missing)}; copy or download them"
        )
    return paths


def weight_file_names(folder: Path) -> tuple[str, ...]:
    """Returns the names of the model's files, present or not; empty if unknown.

    Raises:
        CheckpointError: the index is malformed.
    """
    return tuple(sorted(set(_owners(folder).values())))


def _owners(folder: Path) -> Mapping[str, str]:
    """Maps each tensor of the index to its file; without an index, "" to the single file if any."""
    index = folder / _INDEX
    if not index.is_file():
        return {"": _SINGLE} if (folder / _SINGLE).is_file() else {}
    try:
        owners = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not a valid weight index") from error
    outside = [name for name in owners.values() if not _is_file_name(name)]
    if outside or not owners:
        # Symbolic links are followed, since model caches consist of them; an index may not leave
        # the folder.
        raise CheckpointError(f"{index}: not names of files beside it: {outside!r}")
    return owners


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name not in {"", "..", "."} and not set(name) & set("/\\\0")


def _other_weights(folder: Path) -> str:
    others = sorted(path.name for path in folder.glob("*.bin"))
    if not others:
        return "weights must be safetensors"
    return f"weights must be safetensors, and {others[0]} is not: convert it, or take another copy"


def check_weight_files(folder: Path) -> int:
    """Checks that a folder's weights are there and complete, by their headers alone.

    Returns:
        Total bytes of the files.

    Raises:
        CheckpointError: a file is missing, damaged, or of an unsupported dtype; the message
            names it.
    """
    paths = find_weight_files(folder)
    dtypes = {path.name: _dtypes(path) for path in paths}
    for tensor, name in _owners(folder).items():
        if tensor and tensor not in dtypes[name]:
            raise CheckpointError(
                f"{folder / name} lacks {tensor}, which {_INDEX} says is in it; the files are of "
                "different copies: copy or download the folder again"
            )
    return sum(path.stat().st_size for path in paths)


def _dtypes(path: Path) -> dict[str, str]:
    """Returns the dtypes of all tensors of a file, by name."""
    with open_weights(path, "numpy") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    for name, dtype in dtypes.items():
        if dtype not in _COMPUTED | _MASKS:
            raise CheckpointError(
                f"{path}: {name} has the dtype {dtype}: quantized weights are not supported; take "
                "a copy in bf16, fp16 or fp32"
            )
    return dtypes


def open_weights(path: Path, framework: str) -> Any:
    """Returns a safetensors file as a context manager that opens it for reading.

    Raises:
        CheckpointError: it is not a safetensors file, or it is truncated.
    """
    try:
        return safetensors.safe_open(path, framework=framework)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{path}: not a readable safetensors file: {_why(path) or error}; copy or download it "
            "again"
        ) from error


def _why(path: Path) -> str:
    """Explains why a file is not readable, if that is clearer than the library's error."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(max(8, len(_POINTER)))
            if first.startswith(_POINTER):
                return "it is a pointer of Git LFS, which `git lfs pull` replaces by the weights"
            if size < 8:
                return f"truncated, {size} bytes are there"
            (length,) = struct.unpack_from("<Q", first)
            if not 0 < length <= _LONGEST_HEADER:
                return ""
            file.seek(8)
            whole = 8 + length + _end(file.read(min(length, size)))
    except (OSError, ValueError, RecursionError):
        return ""
    return f"truncated, {size} of {whole} bytes are there" if size < whole else ""


def _end(header: bytes) -> int:
    """Returns the bytes of all tensors according to a header; 0 if it is unreadable or cut."""
    try:
        table = json.loads(header)
        return max(int(each["data_offsets"][1]) for each in table.values() if "dtype" in each)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return 0


def identity_of(about: str, paths: tuple[Path, ...]) -> str:
    """Returns a short identity of weights and of everything that KV depends on.

    It is cheap and independent of the folder's path: it hashes file names, sizes, and samples of
    bytes spread from the header to the end, so that two fine-tunes of one architecture differ.

    Args:
        about: everything else that KV depends on.
        paths: the weight files.
    """
    digest = hashlib.sha256(about.encode())
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES_PER_FILE):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES_PER_FILE - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
