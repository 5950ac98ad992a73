"""Flags of `kvmesh top`. Tests: tests/unit/cli/test_top.py."""

from __future__ import annotations

import argparse

from kvmesh.cli.flags import add_flag, add_switch, new_parser, positive
from kvmesh.cli.scheduler_flags import add_scheduler_flags
from kvmesh.cli.stack_state import add_url_flag

_EPILOG = """\
Workers come from the scheduler; requests, refusals and times to first token from the gateway's
/metrics.

examples:
  kvmesh top
  kvmesh top --once --json
  kvmesh top --scheduler sched:7001 --url http://gateway:8000 --interval 2

exit code: 0; 1 if no scheduler answers; 2 wrong usage
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser with all flags."""
    made = new_parser("kvmesh top", "Shows workers and requests live. Ctrl-C exits.", _EPILOG)
    add_scheduler_flags(made, 5.0)
    add_url_flag(made)
    add_flag(made, "--interval", 1.0, "seconds between two refreshes", kind=positive)
    add_switch(made, "--once", "show one snapshot and exit")
    add_switch(made, "--json", "print JSON, one object per snapshot")
    return made
