"""Which files of a checkpoint folder hold its weights, and whether they are whole. Torch-free.

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
"""What older files hold beside weights, such as masks; nothing reads it."""

_LONGEST_HEADER = 100_000_000
"""Bytes, as the library has it."""

_SAMPLE_BYTES = 4096
_SAMPLES_PER_FILE = 16

_POINTER = b"version https://git-lfs"


def find_weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that make up the model, sorted by name.

    Raises:
        CheckpointError: naming the file that is missing or malformed.
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
    """Names of the files that make up the model, whether they are there or not; none if unknown.

    Raises:
        CheckpointError: the index is malformed.
    """
    return tuple(sorted(set(_owners(folder).values())))


def _owners(folder: Path) -> Mapping[str, str]:
    """The file of each tensor that the index names; without an index, that of all; or none."""
    index = folder / _INDEX
    if not index.is_file():
        return {"": _SINGLE} if (folder / _SINGLE).is_file() else {}
    try:
        owners = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not a valid weight index") from error
    outside = [name for name in owners.values() if not _is_file_name(name)]
    if outside or not owners:
        # Links are followed, as caches of models are made of them; an index leads nowhere else.
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
    """Checks that a folder's weights are there and whole, by their headers alone.

    Returns:
        Bytes of all of them.

    Raises:
        CheckpointError: naming the file that is missing, damaged, or of a kind that is not
            computed.
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
    """Of all tensors of a file, by name."""
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
    """A safetensors file, open for reading while it is entered.

    Raises:
        CheckpointError: it is none, or not all of it is there.
    """
    try:
        return safetensors.safe_open(path, framework=framework)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{path}: not a readable safetensors file: {_why(path) or error}; copy or download it "
            "again"
        ) from error


def _why(path: Path) -> str:
    """Why a file is no safetensors file, where that can be said better than the library does."""
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
    """Bytes of all tensors, as a header says; 0 where it does not, as when it is cut."""
    try:
        table = json.loads(header)
        return max(int(each["data_offsets"][1]) for each in table.values() if "dtype" in each)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return 0


def identity_of(about: str, paths: tuple[Path, ...]) -> str:
    """Short identity of weights and what is made of them.

    Cheap and independent of where the folder lies: file names, sizes, and samples of their bytes
    spread from the header to the end, so that two fine-tunes of one architecture differ.

    Args:
        about: what else KV depends on.
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
