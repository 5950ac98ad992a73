"""Writes the option tables of docs/configuration.md; `--check` only compares.

They come from the config classes.

From the repository root: `python -m scripts.gen_config_docs`. A table stands between
`<!-- options: NAME -->` and `<!-- end of options: NAME -->`.
Tests: tests/unit/docs/test_config_tables.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvmesh.core.config import Option, option, options_of
from kvmesh.runtime.app import ServerConfig
from kvmesh.telemetry.config import TelemetryConfig
from services.decode.config import DecodeConfig
from services.gateway.config import GatewayConfig
from services.kvmanager.config import KvManagerConfig
from services.launcher.config import LauncherConfig
from services.prefill.config import PrefillConfig
from services.ranks.config import RanksConfig
from services.scheduler.config import SchedulerConfig

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"


@dataclasses.dataclass(frozen=True, slots=True)
class CommonConfig:
    """What every service has."""

    server: ServerConfig = option(ServerConfig, "")
    telemetry: TelemetryConfig = option(TelemetryConfig, "")


SERVICES: dict[str, type[Any]] = {
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "kvmanager": KvManagerConfig,
    "launcher": LauncherConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "ranks": RanksConfig,
}

TABLES: dict[str, tuple[type[Any], ...]] = {
    "common": (CommonConfig,),
    "gateway": (GatewayConfig,),
    "scheduler": (SchedulerConfig,),
    "kvmanager": (KvManagerConfig,),
    "launcher": (LauncherConfig,),
    # One program with two default roles: one table, with both defaults where they differ.
    "workers": (PrefillConfig, DecodeConfig),
    "ranks": (RanksConfig,),
}


def table(configs: Sequence[type[Any]], *, without: Sequence[type[Any]] = ()) -> str:
    """A Markdown table of options, in the order of the first class.

    Args:
        configs: classes with the same options; defaults that differ are shown side by side.
        without: classes whose options are left out.
    """
    left_out = {leaf.path for config in without for leaf in options_of(config)}
    columns = [
        [leaf for leaf in options_of(config) if leaf.path not in left_out] for config in configs
    ]
    paths = [[leaf.path for leaf in column] for column in columns]
    assert all(column == paths[0] for column in paths), "configs of one table have the same options"
    lines = ["| flag | environment | default | meaning |", "|---|---|---|---|"]
    lines += [_row(same) for same in zip(*columns, strict=True)]
    return "\n".join(lines) + "\n"


def _row(same: Sequence[Option]) -> str:
    first = same[0]
    defaults = list(dict.fromkeys(_shown(leaf.default) for leaf in same))
    meaning = first.help.replace("|", "\\|")
    flag = f"`{first.flag}`" if first.flag else "–"
    return f"| {flag} | `{first.env}` | {' / '.join(defaults)} | {meaning} |"


def _shown(default: Any) -> str:
    if default in (None, ""):
        return "–"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def all_tables() -> dict[str, str]:
    """Every table by its name in the document."""
    return {
        name: table(configs, without=() if name == "common" else (CommonConfig,))
        for name, configs in TABLES.items()
    }


def with_tables(text: str, tables: Mapping[str, str]) -> str:
    """The document with fresh tables.

    Raises:
        SystemExit: the document lacks a table's markers.
    """
    for name, fresh in tables.items():
        begin, end = f"<!-- options: {name} -->\n", f"<!-- end of options: {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"{DOCUMENT} needs the markers of the options of {name} once")
        before, rest = text.split(begin)
        text = before + begin + fresh + end + rest.split(end)[1]
    return text


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the tables differ")
    check = parser.parse_args().check
    old = DOCUMENT.read_text()
    new = with_tables(old, all_tables())
    if check and new != old:
        print(
            f"{DOCUMENT} differs from the config classes; run it without --check",
            file=sys.stderr,
        )
        raise SystemExit(1)
    if not check:
        DOCUMENT.write_text(new)


if __name__ == "__main__":
    main()
