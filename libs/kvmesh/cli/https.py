"""HTTPS of gateways and admin ports, also where this machine does not know their CA.

Tests: tests/unit/cli/test_https.py.
"""

from __future__ import annotations

import argparse
import ssl

from kvmesh.cli.flags import add_flag
from kvmesh.core.errors import ConfigError

_NOT_VERIFIED = "CERTIFICATE_VERIFY_FAILED"


def add_ca_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--tls-ca`, for `trust`."""
    text = "CA (PEM) of a server with https://; default: those that this machine trusts"
    add_flag(parser, "--tls-ca", "", text, metavar="FILE")


def trust(ca: str) -> ssl.SSLContext:
    """How a server is to prove itself.

    Args:
        ca: file with the certificates (PEM) that count; empty takes those of this machine.

    Raises:
        ConfigError: the file cannot be read, or holds no certificate.
    """
    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as error:  # of which ssl.SSLError is one
        reason = error.strerror if not isinstance(error, ssl.SSLError) else "no certificate in it"
        raise ConfigError(f"--tls-ca {ca}: {reason}") from error


def ca_hint(reason: str) -> str:
    """What to do about a failed connection, if its cause is that the CA is not known."""
    return "name the CA of its certificate with --tls-ca" if _NOT_VERIFIED in reason else ""
