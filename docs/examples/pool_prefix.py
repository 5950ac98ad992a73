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

from kvmesh.core.mesh_secret import load_secret
from kvmesh.kv.hashing import chain_hashes, root_hash
from kvmesh.pool.pool import open_pool
from kvmesh.rpc.channels import MeshAccess

NUM_TOKENS = 256


async def main(options: argparse.Namespace) -> None:
    """Stores and reads."""
    access = MeshAccess(secret=load_secret(options.secret_file))
    async with open_pool(options.kvmanager, [options.scheduler], options.model, access) as pool:
        # A block's name says the model, who may find it, and all tokens up to its end.
        layout = pool.layout
        root = root_hash(layout.model_fingerprint, cache_salt="example")
        tokens = [random.randrange(1000) for _ in range(NUM_TOKENS)]
        hashes = chain_hashes(root, tokens, layout.block_size)

        # The worker that stores them, and the bytes, which a real program computes.
        (plan,) = pool.gen_plans([hashes], [1], pool.get_prefix_tree()).transfer_plans
        assert plan is not None, "no worker holds these tokens"
        async with pool.init_transfer(plan) as buffer:
            stored = os.urandom(buffer.blocks.nbytes)
            buffer.blocks[:] = stored
            await pool.put(buffer)
        print(f"{plan.target.worker_id} has {len(hashes)} blocks, {len(stored):,} bytes")

        # Other programs find them as soon as the worker has published them.
        await pool.found(hashes)
        (found,) = pool.gen_plans([hashes], [1], pool.get_prefix_tree()).query_plans
        assert found is not None, "a worker holds them"
        is_same = "the same bytes" if await pool.read(found) == stored else "other bytes"
        print(f"read from {found.holder.worker_id}: {is_same}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--kvmanager", "--scheduler", "--model", "--secret-file"):
        parser.add_argument(name, required=True)
    asyncio.run(main(parser.parse_args()))
