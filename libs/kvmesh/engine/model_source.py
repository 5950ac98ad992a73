"""Finds a model by its folder or its name on the Hugging Face hub: `org/name[@revision]`.

A folder takes precedence, then the hub's cache on this machine, then a download into that cache.
The
package `huggingface_hub` does all of it and reads its own variables: HF_HOME, HF_HUB_CACHE,
HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT. Torch-free. Tests: tests/integration/test_model_source.py.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.checkpoint import load_model_config
from kvmesh.engine.weight_files import weight_file_names

_HUB_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?"
)
_DESCRIPTIONS = ("*.json", "*.jinja")
_BELOW = "*/*"
"""Pattern of files in subfolders of a repository, which hold other formats of the model."""

_GIB = 1 << 30


def is_hub_name(model: str) -> bool:
    """Returns whether this may be a name on the hub, and is no local folder."""
    return not Path(model).is_dir() and _HUB_NAME.fullmatch(model) is not None


def served_name(model: str) -> str:
    """Returns the default name for clients: the hub's name, or the folder's own name."""
    if is_hub_name(model):
        return model.partition("@")[0]
    return Path(model).name


def find_model(model: str, *, has_weights: bool = True, is_ours: bool = True) -> Path:
    """Returns the folder of a model; downloads it if it is not on this machine. May take minutes.

    Args:
        model: a folder, or a name on the hub.
        has_weights: whether the weights are needed; tokenizing alone needs none.
        is_ours: whether KVMesh's own engine computes it; another engine has other families.

    Raises:
        CheckpointError: the model does not exist, cannot be reached, has no room on disk, or is
            of an unsupported family, which is checked before the weights are downloaded.
    """
    if Path(model).is_dir():
        return Path(model)
    found = _HUB_NAME.fullmatch(model)
    if found is None:
        raise CheckpointError(
            f"{model} is no folder; name a model folder, or org/name of the Hugging Face hub"
        )
    try:
        import huggingface_hub  # noqa: F401, PLC0415 - half a second, for names alone
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{model} is no folder here; `pip install huggingface_hub` to have it downloaded by "
            "its name"
        ) from error
    name, revision = found["name"], found["revision"]
    with _told(model):
        with _quiet():
            folder = _cached(name, revision)
            if folder is not None and _is_complete(folder, has_weights):
                return folder
            folder = _describe(name, revision)
        return _with_weights(name, folder, is_ours) if has_weights else folder


def _cached(name: str, revision: str | None) -> Path | None:
    """Returns the model's folder in the cache, which may be incomplete; None without one."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    try:
        none_of_them = ["*"]  # otherwise it would require files that are not needed
        return Path(
            snapshot_download(
                name, revision=revision, local_files_only=True, ignore_patterns=none_of_them
            )
        )
    except FileNotFoundError:
        return None


def _is_complete(folder: Path, has_weights: bool) -> bool:
    """Returns whether all needed files are in the cache; a download may be incomplete."""
    names = ["config.json", "tokenizer.json"]
    if has_weights:
        names += _weights(folder)
    return all((folder / name).is_file() for name in names)


def _weights(folder: Path) -> tuple[str, ...]:
    return weight_file_names(folder) or ("model.safetensors",)


def _describe(name: str, revision: str | None) -> Path:
    """Downloads all files except weights."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    patterns = list(_DESCRIPTIONS)
    return Path(
        snapshot_download(
            name, revision=revision, allow_patterns=patterns, ignore_patterns=[_BELOW]
        )
    )


def _with_weights(name: str, folder: Path, is_ours: bool) -> Path:
    """Downloads the weights of the same revision as the model's other files."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    if is_ours and (folder / "config.json").is_file():
        load_model_config(folder)
    commit, weights = folder.name, list(_weights(folder))
    with _quiet():
        planned = snapshot_download(name, revision=commit, allow_patterns=weights, dry_run=True)
    needed = sum(each.file_size or 0 for each in planned if each.will_download)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{name} takes {needed / _GIB:.1f} GiB and {free / _GIB:.1f} GiB are free at "
            f"{folder.parents[2]}; free some, or name another folder with HF_HUB_CACHE"
        )
    with nullcontext() if sys.stderr.isatty() else _quiet():
        return Path(snapshot_download(name, revision=commit, allow_patterns=weights))


@contextmanager
def _quiet() -> Iterator[None]:
    """Disables the package's progress bars, for short downloads and without a terminal."""
    from huggingface_hub.utils.tqdm import (  # noqa: PLC0415
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _told(model: str) -> Iterator[None]:
    """Turns the package's long errors into one line."""
    from huggingface_hub import constants, errors  # noqa: PLC0415
    from huggingface_hub.utils import logging as their_logging  # noqa: PLC0415

    their_logging.set_verbosity(logging.ERROR)
    try:
        yield
    except CheckpointError:
        raise
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{model}: its owners give access on request; ask for it at {constants.ENDPOINT}/"
            f"{model.partition('@')[0]}, then set HF_TOKEN to a token of yours"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{model}: the model has no such revision") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{model} is no folder here and no model at {constants.ENDPOINT}; correct the name, or "
            "set HF_TOKEN if it is private"
        ) from error
    except FileNotFoundError as error:  # not in the cache, and the hub is unreachable
        text = f"{model} is no folder here and not in the cache; {_way()}"
        raise CheckpointError(text) from error
    except Exception as error:  # including those of the package's HTTP library
        raise CheckpointError(
            f"{model} cannot be downloaded: {_first_line(error)}; try again, files that are whole "
            "stay"
        ) from error


def _way() -> str:
    from huggingface_hub import constants  # noqa: PLC0415

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids a download: unset it, or name a folder"
    return f"{constants.ENDPOINT} cannot be reached: name a folder, or set HF_ENDPOINT to a mirror"


def _first_line(error: BaseException) -> str:
    text = " ".join(str(error).split("\n")[0].split())
    return text or type(error).__name__
