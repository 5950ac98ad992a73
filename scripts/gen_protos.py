"""Generates the Python stubs in libs/kvmesh/v1 from protos/; `--check` only compares."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
OUT = ROOT / "libs"


def generate(out: Path) -> None:
    """Runs protoc for all proto files; gRPC stubs only for files that define a service."""
    include = Path(grpc_tools.__file__).parent / "_proto"
    files = sorted(PROTOS.rglob("*.proto"))
    services = [f for f in files if "\nservice " in f.read_text()]
    bin_folder = Path(sys.executable).parent  # where pip put the mypy plugins
    base = [
        "protoc",
        f"--plugin=protoc-gen-mypy={bin_folder / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={bin_folder / 'protoc-gen-mypy_grpc'}",
        f"-I{PROTOS}",
        f"-I{include}",
    ]
    runs = [
        [f"--python_out={out}", f"--mypy_out=quiet:{out}", *map(str, files)],
        [f"--grpc_python_out={out}", f"--mypy_grpc_out=quiet:{out}", *map(str, services)],
    ]
    for arguments in runs:
        if protoc.main([*base, *arguments]) != 0:
            raise SystemExit("protoc failed; see its message above")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the stubs in the tree differ")
    if not parser.parse_args().check:
        generate(OUT)
        return
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        stale = [
            str(path.relative_to(fresh))
            for path in sorted(fresh.rglob("*_pb2*"))
            if not (OUT / path.relative_to(fresh)).exists()
            or path.read_bytes() != (OUT / path.relative_to(fresh)).read_bytes()
        ]
    if stale:
        print(f"stubs differ from protos/: {', '.join(stale)}; run `make proto`", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
