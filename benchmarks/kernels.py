"""The Triton kernels on a CUDA device: share of the measured copy and matmul ceilings, against
their torch twins and other implementations. Writes bench/results/kernels.json and kernels.md, anew
after each case: first every kernel beside its twin and SDPA, then rivals that compile for minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError
from triton.testing import do_bench, do_bench_cudagraph

from benchmarks.kernel_case import LARGE, Compute, KernelCase
from benchmarks.kernel_cases import case_makers
from benchmarks.kernel_rivals import SDPA, is_same, largest_difference, rivals
from benchmarks.peer_versions import own_versions
from benchmarks.result import RESULTS, Row, Target, document, save

_COPY_BYTES = 2 << 30
_MATMUL = 8192
_LARGEST_DIFFERENCE = 0.02
"""From the twin, of its largest value: sums in half precision differ by less."""
DEVICE_LOST = 3
"""Exit code: the rows so far are written, and a new process can go on with `--resume`."""
# What torch, Triton and rivals raise for what they cannot compute or compile.
_FAILURES = (RuntimeError, ValueError, ImportError, OSError, TypeError, TritonError)
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> None:
    """Measures and writes the result."""
    options = _parse()
    if not torch.cuda.is_available():
        sys.exit(
            "bench-kernels needs a CUDA device; `make test` checks the kernels' numbers on any"
        )
    torch.manual_seed(options.seed)
    device, dtype = torch.device("cuda"), _DTYPES[options.dtype]
    ceilings = {"tb_s": _copy_tb_s(device), "tflop_s": _matmul_tflop_s(dtype, device)}
    peers = own_versions("flashinfer")
    makers = case_makers(LARGE, dtype, device)
    rows: list[Row] = _earlier(options.save) if options.resume else []
    for take in (take_case, take_slow_rivals):
        for number, make in enumerate(makers, 1):
            sys.stderr.write(f"\r{take.__name__}: {number}/{len(makers)}\x1b[K")
            take(number, make, rows, ceilings)
            _write(rows, options, ceilings, peers)
            if not _still_works():
                sys.exit(DEVICE_LOST)
    sys.stderr.write("\n")
    sys.stdout.write(f"{options.save}\n")


def take_case(
    number: int, make: Callable[[], KernelCase], rows: list[Row], ceilings: dict[str, float]
) -> None:
    """Adds the row of a case that has none, also of one whose inputs cannot be made."""
    case = _made(number, make)
    if not isinstance(case, KernelCase):
        if case["kernel"] not in {row["kernel"] for row in rows}:
            rows.append(case)
    elif _row_of(case, rows) is None:
        rows.append(_measured(case, ceilings))


def take_slow_rivals(
    number: int, make: Callable[[], KernelCase], rows: list[Row], _ceilings: dict[str, float]
) -> None:
    """Holds slow rivals against a case that has a time of its own, unless they were already."""
    case = _made(number, make)
    row = _row_of(case, rows) if isinstance(case, KernelCase) else None
    if row is None or not isinstance(case, KernelCase) or "ms" not in row:
        return
    if row["slow rivals"] is None and any(rivals(case, slow=True)):
        _add_slow_rivals(case, row)


def _made(number: int, make: Callable[[], KernelCase]) -> KernelCase | Row:
    """A case, or the row of one whose inputs cannot be made."""
    try:
        return make()
    except _FAILURES as error:
        return {"kernel": f"case {number}", "shape": "its inputs", "failed": _said(error)}


def _row_of(case: KernelCase, rows: list[Row]) -> Row | None:
    found = (row for row in rows if (row["kernel"], row["shape"]) == (case.name, case.shape))
    return next(found, None)


def _measured(case: KernelCase, ceilings: dict[str, float]) -> Row:
    """A row, also of a kernel that fails: the others are measured all the same."""
    try:
        return _measure(case, ceilings)
    except _FAILURES as error:
        return {"kernel": case.name, "shape": case.shape, "failed": _said(error)}


def _said(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:80]


def _still_works() -> bool:
    """Whether the device takes more work: after a wrong access this process can launch nothing."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _earlier(path: Path) -> list[Row]:
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def _write(
    rows: list[Row],
    options: argparse.Namespace,
    ceilings: dict[str, float],
    peers: dict[str, str],
) -> None:
    result = document(rows, targets(rows), options.seed, _notes(ceilings), peers)
    result["machine"] |= {
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "ceilings": ceilings,
    }
    save(result, options.save)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="keep the rows of the file")
    parser.add_argument("--save", type=Path, default=RESULTS / "kernels.json")
    return parser.parse_args()


def _milliseconds(compute: Compute) -> float:
    """Median of repeated calls, the device's cache emptied before each."""
    return float(do_bench(compute, return_mode="median"))


def _captured_milliseconds(compute: Compute) -> float | None:
    """Median of repeats within a CUDA graph, as in a captured step; None if it cannot be one."""
    try:
        return round(float(do_bench_cudagraph(compute, return_mode="median")), 4)
    except RuntimeError:  # torch's error for whatever a capture forbids
        return None


def _copy_tb_s(device: torch.device) -> float:
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _milliseconds(lambda: target.copy_(source)) / 1e9


def _matmul_tflop_s(dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.randn(_MATMUL, _MATMUL, dtype=dtype, device=device) for _ in range(2))
    return 2 * float(_MATMUL) ** 3 / _milliseconds(lambda: a @ b) / 1e9


def _measure_rivals(case: KernelCase, *, slow: bool) -> tuple[dict[str, float], list[str]]:
    """Times of those that compute the same, and why the others have none."""
    times: dict[str, float] = {}
    failed: list[str] = []
    for name, prepare in rivals(case, slow=slow):
        try:
            compute = prepare()
            if not is_same(case.ours(), compute()):
                failed.append(f"{name}: other numbers")
                continue
            times[name] = _milliseconds(compute)
        except _FAILURES as error:
            failed.append(f"{name}: {_said(error)}")
    return times, failed


def _measure(case: KernelCase, ceilings: dict[str, float]) -> Row:
    difference = largest_difference(case.ours(), case.twin())
    ours = _milliseconds(case.ours)
    others, failed = _measure_rivals(case, slow=False)
    sdpa = [time for name, time in others.items() if name.startswith(SDPA)]
    best = min(others, key=others.__getitem__) if others else None
    floor_ms = max(case.num_bytes / ceilings["tb_s"] / 1e9, case.flops / ceilings["tflop_s"] / 1e9)
    return {
        "kernel": case.name,
        "shape": case.shape,
        "ms": round(ours, 4),
        "captured ms": _captured_milliseconds(case.ours) if case.can_be_captured else None,
        "tb_s": round(case.num_bytes / ours / 1e9, 3),
        "tflop_s": round(case.flops / ours / 1e9, 1),
        "share of ceiling": round(floor_ms / ours, 3),
        "difference": float(f"{difference:.2g}"),
        "twin ms": round(_milliseconds(case.twin), 4),
        "best rival": best,
        "rival ms": None if best is None else round(others[best], 4),
        "SDPA ms": round(min(sdpa), 4) if sdpa else None,
        "slow rivals": None,
        "rivals not run": "; ".join(failed) or None,
    }


def _add_slow_rivals(case: KernelCase, row: Row) -> None:
    others, failed = _measure_rivals(case, slow=True)
    row["slow rivals"] = "; ".join(f"{name} {ms:.4f} ms" for name, ms in others.items()) or "none"
    for name, ms in others.items():
        if row["rival ms"] is None or ms < row["rival ms"]:
            row["best rival"], row["rival ms"] = name, round(ms, 4)
    row["rivals not run"] = "; ".join(filter(None, [row["rivals not run"], *failed])) or None


def targets(rows: list[Row]) -> list[Target]:
    """What the kernels are to reach; a row that is not there leaves its target unmeasured."""

    def value(kernel: str, shape: str, key: str) -> float | None:
        found = [row.get(key) for row in rows if (row["kernel"], row["shape"]) == (kernel, shape)]
        return found[0] if found else None

    def against_sdpa(shape: str) -> float | None:
        ours, sdpa = (value("paged prefill", shape, key) for key in ("ms", "SDPA ms"))
        return None if ours is None or sdpa is None else sdpa / ours

    batch = "batch 32, context 8192"
    return [
        Target(
            f"paged decode, {batch}, of copy",
            value("paged decode", batch, "share of ceiling"),
            0.85,
        ),
        *(
            Target(f"paged prefill, {row['shape']}, x best SDPA", against_sdpa(row["shape"]), 0.9)
            for row in rows
            if row["kernel"] == "paged prefill"
        ),
        *(
            Target(f"{row['kernel']}, {row['shape']}, x twin", _times_twin(row), 1.0)
            for row in rows
        ),
        *(
            Target(
                f"{row['kernel']}, {row['shape']}, difference",
                row.get("difference"),
                _LARGEST_DIFFERENCE,
                at_most=True,
            )
            for row in rows
        ),
    ]


def _times_twin(row: Row) -> float | None:
    return row["twin ms"] / row["ms"] if "ms" in row else None


def _notes(ceilings: dict[str, Any]) -> list[str]:
    return [
        f"ceilings: copy {ceilings['tb_s']:.2f} TB/s, {ceilings['tflop_s']:.0f} TFLOP/s",
        "share of ceiling: time at the ceiling that binds (bytes or operations) / time measured",
        "medians with a cold cache; rivals read contiguous keys and values, FlashInfer blocks",
        "captured: repeated within a CUDA graph with warm caches, nothing launched from the host",
        "difference: largest from the twin, of its largest value",
        "rivals are timed where their numbers are the kernel's",
        "in-place kernels include a copy of their input, on both sides",
    ]


if __name__ == "__main__":
    main()
