"""`kvmesh pool`: shows hot prefixes, their holders and the orders for them, as a kvmanager knows
them.

Tests: tests/unit/cli/test_pool.py.
"""

from __future__ import annotations

import json
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from kvmesh.cli.flags import add_flag, add_switch, new_parser, positive
from kvmesh.cli.https import add_ca_flag, ca_hint, trust
from kvmesh.cli.screen import terminal
from kvmesh.cli.stack_state import add_state_flag, local_stack
from kvmesh.core.errors import KvMeshError
from kvmesh.core.text_files import UNREADABLE, why_unreadable

_NO_TOKEN = 401
_NAME_CHARS = 12
"""Number of shown characters of a prefix's hash."""

_EPILOG = """\
Reads the admin port of a kvmanager (--server.admin.port). With several replicas, ask the one that
plans; another one shows the state of the time when it last planned.

examples:
  kvmesh pool
  kvmesh pool --admin-url http://127.0.0.1:7102
  kvmesh pool --admin-url http://127.0.0.1:7102 --admin-token-file admin.token --json

exit code: 0; 1 if no kvmanager answers; 2 wrong usage
"""


class NoViewError(KvMeshError):
    """The admin port did not answer, or its answer is no view of the pool."""

    grpc_status = "UNAVAILABLE"
    retry_safe = True


def main(argv: Sequence[str]) -> int:
    """Prints the view once."""
    parser = new_parser("kvmesh pool", "Shows hot prefixes and their copies.", _EPILOG)
    add_flag(
        parser,
        "--admin-url",
        "",
        "URL of a kvmanager's admin port; default: the kvmanager of `kvmesh up`",
        metavar="http://HOST:PORT",
    )
    add_state_flag(parser)
    add_flag(
        parser,
        "--admin-token-file",
        "",
        "file with the bearer token of the admin port",
        metavar="FILE",
    )
    add_ca_flag(parser)
    add_flag(parser, "--timeout", 5.0, "timeout in seconds", kind=positive)
    add_switch(parser, "--json", "print JSON")
    arguments = parser.parse_args(argv)
    url = arguments.admin_url or _local_url(arguments.state_dir)
    if not url:
        raise NoViewError(
            "no local stack runs; start one with `kvmesh up`, or name the admin port of a "
            "kvmanager with --admin-url"
        )
    if not url.startswith(("http://", "https://")):
        parser.error("--admin-url must be http://HOST:PORT")
    try:
        path = arguments.admin_token_file
        token = Path(path).read_text(encoding="utf-8").strip() if path else ""
    except UNREADABLE as error:
        parser.error(f"{path}: {why_unreadable(error)}")
    view = fetch_view(url, token, arguments.timeout, trust(arguments.tls_ca))
    if arguments.json:
        sys.stdout.write(json.dumps(view, indent=2) + "\n")
    else:
        terminal().print(picture(view))
    return 0


def _local_url(state_dir: str) -> str:
    """Returns the admin URL of the local stack's kvmanager; empty without one."""
    address = local_stack(state_dir).get("pool", "")
    return f"http://{address}" if address else ""


def fetch_view(
    url: str, token: str, timeout_s: float, tls: ssl.SSLContext | None = None
) -> dict[str, Any]:
    """Returns the answer of `/debug/segments`.

    Args:
        tls: trusted CAs for an https:// URL; None: those of this machine.

    Raises:
        NoViewError: no server answers, or the answer is no view of the pool.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/debug/segments", headers=headers)
    except ValueError as error:
        raise NoViewError(f"{url} is no URL: {error}; it is http://HOST:PORT") from error
    https = urllib.request.HTTPSHandler(context=tls)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), https)
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            view = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            hint = "; it wants its token, --admin-token-file" if error.code == _NO_TOKEN else ""
            raise NoViewError(f"{url} answers {error.code}: {error.reason}{hint}") from error
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "reason", error))
        raise NoViewError("; ".join(filter(None, (f"{url}: {reason}", ca_hint(reason))))) from error
    if not isinstance(view, dict) or "segments" not in view:
        raise NoViewError(f"{url} is not the admin port of a kvmanager")
    return view


def picture(view: Mapping[str, Any]) -> Group:
    """Returns the view for the terminal."""
    who = "this replica plans" if view["planning"] else "another replica plans, or nobody"
    return Group(
        f"{who}; unevenness of reads (CV) {view['reads_cv']:g}",
        "",
        _table(
            ("worker", "role", "cluster", "reads", "room", "state"),
            [
                (
                    each["worker_id"],
                    each["role"],
                    each["cluster"],
                    f"{each['read_blocks']:g}",
                    str(each["room_blocks"]),
                    "leaving" if each["leaving"] else "",
                )
                for each in view["workers"]
            ],
        ),
        "",
        _table(
            ("prefix", "reads", "blocks", "holders"),
            [
                (
                    each["prefix"][:_NAME_CHARS],
                    f"{each['reads']:g}",
                    str(each["num_blocks"]),
                    ", ".join(each["holders"]) or "-",
                )
                for each in view["segments"]
            ],
        ),
        "",
        _table(
            ("order", "prefix", "from", "to", "blocks", "reason"),
            [
                (
                    each["order"],
                    each["prefix"][:_NAME_CHARS],
                    each.get("source", ""),
                    each["target"],
                    str(each["num_blocks"]),
                    each.get("reason", ""),
                )
                for each in view["orders"]
            ],
        ),
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        is_number = heading in ("reads", "room", "blocks")
        table.add_column(heading, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*row)
    return table
