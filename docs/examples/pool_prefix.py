"""Stores the KV of a prefix in a running mesh, finds it, and reads it back.

    python docs/examples/pool_prefix.py --kvmanager 127.0.0.1:7102 --scheduler 127.0.0.1:7101 \
        --model my-model --secret-file mesh.secret

The workers have to be started with --fetch.max-stores 1 or more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys

from kvmesh.core.mesh_secret import load_secret
from kvmesh.kv.hashing import chain_hashes, root_hash
from kvmesh.pool.pool import open_pool
from kvmesh.rpc.channels import MeshAccess

NUM_TOKENS = 256


def tell(text: str) -> None:
    """Prints a line."""
    sys.stdout.write(f"{text}\n")


async def main(options: argparse.Namespace) -> None:
    """Stores and reads."""
    access = MeshAccess(secret=load_secret(options.secret_file))
    async with open_pool(options.kvmanager, [options.scheduler], options.model, access) as pool:
        # What the blocks are called: the model, who may find them, and all tokens before.
        layout = pool.layout
        root = root_hash(layout.model_fingerprint, cache_salt="example")
        tokens = [random.randrange(1000) for _ in range(NUM_TOKENS)]
        hashes = chain_hashes(root, tokens, layout.block_size)

        # Where they go, and the bytes that somebody computed.
        (plan,) = pool.gen_plans([hashes], [1], pool.get_prefix_tree()).transfer_plans
        assert plan is not None, "nobody has these tokens"
        async with pool.init_transfer(plan) as buffer:
            stored = os.urandom(buffer.blocks.nbytes)
            buffer.blocks[:] = stored
            await pool.put(buffer)
        tell(f"{plan.target.worker_id} has {len(hashes)} blocks, {len(stored):,} bytes")

        # Others find them as soon as the worker has told of them.
        await pool.found(hashes)
        (found,) = pool.gen_plans([hashes], [1], pool.get_prefix_tree()).query_plans
        assert found is not None, "somebody has them"
        same = await pool.read(found) == stored
        tell(f"read from {found.holder.worker_id}: {'the same bytes' if same else 'other bytes'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--kvmanager", "--scheduler", "--model", "--secret-file"):
        parser.add_argument(name, required=True)
    asyncio.run(main(parser.parse_args()))
