"""HTTPS to gateways and admin ports, also if this machine does not trust their CA.

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
    text = "CA file (PEM) for https:// servers; default: the CAs that this machine trusts"
    add_flag(parser, "--tls-ca", "", text, metavar="FILE")


def trust(ca: str) -> ssl.SSLContext:
    """Returns the TLS context that verifies a server's certificate.

    Args:
        ca: file with the trusted certificates (PEM); empty: those of this machine.

    Raises:
        ConfigError: the file cannot be read, or contains no certificate.
    """
    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as error:  # includes ssl.SSLError
        reason = error.strerror if not isinstance(error, ssl.SSLError) else "no certificate in it"
        raise ConfigError(f"--tls-ca {ca}: {reason}") from error


def ca_hint(reason: str) -> str:
    """Returns a hint if a connection failed because the CA is not trusted; else empty."""
    return "name the CA of its certificate with --tls-ca" if _NOT_VERIFIED in reason else ""
