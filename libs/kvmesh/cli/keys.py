"""`kvmesh keys`: manages API keys, and tenants with their limits. A key is shown once, at creation.

Tests: tests/unit/cli/test_keys.py.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from kvmesh.cli.flags import add_flag, new_parser
from kvmesh.cli.screen import terminal
from kvmesh.core.config import environment, without_password
from kvmesh.metadata.redis_client import RedisClient, RedisConfig
from kvmesh.metadata.store import StoreUnavailableError
from kvmesh.metadata.tenant_store import FileTenantStore, RedisTenantStore, TenantStore
from kvmesh.metadata.tenants import (
    KEY_PREFIX,
    Directory,
    DirectoryError,
    KeyRecord,
    digest_of,
    directory_from_json,
    directory_to_json,
)
from kvmesh.policy.quota import TenantLimits

ATTEMPTS = 5
KEY_BYTES = 32

# In the order of the fields of TenantLimits.
_COLUMNS = (
    *("requests/min", "tokens/min", "at once", "priority", "weight"),
    *("TTFT ms", "TPOT ms", "ITL ms", "share of a group"),
)

Change = Callable[[Directory], Directory]

_EPILOG = """actions:
  create --tenant NAME    make a key; the tenant is made if it is new
  limit --tenant NAME     set the tenant's limits
  list                    tenants, limits and key ids
  revoke ID               remove a key

example: kvmesh keys create --tenant acme --requests-per-min 600 --tenants-file tenants.json
"""


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "kvmesh keys",
        "Creates, lists and revokes API keys. Gateways apply changes within "
        "`access.refresh_s` seconds.",
        _EPILOG,
    )
    parser.add_argument("action", choices=["create", "limit", "list", "revoke"])
    parser.add_argument("key_id", nargs="?", default="", metavar="ID")
    add_flag(
        parser, "--tenants-file", "tenants.json", "tenants file, the gateway's access.tenants_file"
    )
    add_flag(
        parser,
        "--redis-url",
        "",
        "URL of a Redis to use instead of the file; set its password in KVMESH_REDIS__PASSWORD",
    )
    add_flag(parser, "--key-prefix", "kvmesh:", "prefix of the keys in Redis")
    add_flag(parser, "--tenant", "", "name of the tenant")
    for name, kind, text in (
        ("requests-per-min", int, "maximum requests per minute; 0: no limit"),
        ("tokens-per-min", int, "maximum prompt and generated tokens per minute; 0: no limit"),
        ("max-concurrent", int, "maximum concurrent requests; 0: no limit"),
        ("priority", int, "priority while prefill workers are scarce; higher goes first"),
        ("weight", float, "weight of the tenant's share among tenants of equal priority"),
        ("ttft-ms", int, "default wait for a worker in milliseconds; 0: the gateway's default"),
        ("tpot-ms", int, "default limit on TPOT in milliseconds; 0: the gateway's default"),
        ("itl-ms", int, "default limit on ITL in milliseconds; 0: the gateway's default"),
        ("group-share", float, "maximum fraction of a group's decode slots; 0: no limit"),
    ):
        add_flag(parser, f"--{name}", None, text, kind=kind)
    return parser


def _open(arguments: argparse.Namespace) -> TenantStore:
    if not arguments.redis_url:
        return FileTenantStore(Path(arguments.tenants_file))
    password = environment("KVMESH_REDIS__PASSWORD")
    config = RedisConfig(arguments.redis_url, password, arguments.key_prefix, timeout_s=5.0)
    return RedisTenantStore(RedisClient(config))


async def _read(store: TenantStore) -> tuple[bytes, Directory]:
    raw = await store.read()
    return raw, directory_from_json(raw) if raw else Directory()


async def _change(store: TenantStore, change: Change) -> None:
    for _ in range(ATTEMPTS):
        raw, directory = await _read(store)
        if await store.replace(raw, directory_to_json(change(directory))):
            return
    raise StoreUnavailableError("the directory keeps changing; try again")


def _named_limits(arguments: argparse.Namespace) -> dict[str, Any]:
    names = [item.name for item in dataclasses.fields(TenantLimits)]
    return {
        name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None
    }


def _limited(arguments: argparse.Namespace) -> Change:
    """Returns the change that sets the named limits of the tenant and keeps its others."""
    given = _named_limits(arguments)

    def change(directory: Directory) -> Directory:
        if arguments.action == "limit" and arguments.tenant not in directory.tenants:
            known = ", ".join(sorted(directory.tenants)) or "none"
            raise DirectoryError(f"there is no tenant {arguments.tenant!r}; known: {known}")
        before = directory.tenants.get(arguments.tenant, TenantLimits())
        return directory.with_tenant(arguments.tenant, dataclasses.replace(before, **given))

    return change


def _revoked(key_id: str) -> Change:
    """Returns the change that removes a key; its error for a wrong id says where ids are listed."""

    def change(directory: Directory) -> Directory:
        try:
            return directory.without_key(key_id)
        except DirectoryError as error:
            raise DirectoryError(f"{error}; `kvmesh keys list` shows the ids") from error

    return change


def _show(directory: Directory) -> None:
    if not directory.tenants:
        print("no tenants yet; `kvmesh keys create --tenant NAME` makes one", file=sys.stderr)
        return
    limits = Table("tenant", *_COLUMNS)
    for name, each in sorted(directory.tenants.items()):
        limits.add_row(name, *map(str, dataclasses.astuple(each)))
    keys = Table("key id", "tenant", "created")
    for key in sorted(directory.keys.values(), key=lambda key: (key.tenant, key.created)):
        keys.add_row(key.key_id, key.tenant, key.created)
    console = terminal()
    console.print(limits)
    console.print(keys)


async def _run(arguments: argparse.Namespace) -> None:
    store = _open(arguments)
    limited = _limited(arguments)
    redis = f"the directory in Redis (--redis-url {without_password(arguments.redis_url)})"
    place = redis if arguments.redis_url else arguments.tenants_file
    try:
        match arguments.action:
            case "list":
                _show((await _read(store))[1])
            case "revoke":
                await _change(store, _revoked(arguments.key_id))
                print(f"key {arguments.key_id} revoked", file=sys.stderr)
            case "limit":
                await _change(store, limited)
                print(f"limits of {arguments.tenant} set", file=sys.stderr)
            case _:
                key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
                created = time.strftime("%Y-%m-%d", time.gmtime())
                record = KeyRecord(digest_of(key), arguments.tenant, created)
                await _change(store, lambda directory: limited(directory).with_key(record))
                # Says where the hash was stored: the default file is easily the wrong one.
                head = f"key {record.key_id} of {record.tenant}, kept hashed in {place}"
                print(f"{head}; shown once:", file=sys.stderr)
                print(key)
    except DirectoryError as error:
        raise DirectoryError(f"{place}: {error}") from error
    except StoreUnavailableError as error:
        raise StoreUnavailableError(f"{place} cannot be reached: {error}") from error
    finally:
        await store.close()


def main(argv: Sequence[str]) -> int:
    """Runs one action; returns exit code 0 when it was done."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.key_id and arguments.action != "revoke":
        parser.error(f"{arguments.action} takes no ID; did you mean --tenant {arguments.key_id}?")
    if arguments.action in ("create", "limit") and not arguments.tenant:
        parser.error(f"{arguments.action} needs --tenant")
    if arguments.action == "limit" and not _named_limits(arguments):
        parser.error("limit needs a limit, such as --requests-per-min 600")
    if arguments.action == "revoke" and not arguments.key_id:
        parser.error("revoke needs the id of a key")
    asyncio.run(_run(arguments))
    return 0
