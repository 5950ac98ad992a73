"""TLS contexts of sockets that are not gRPC's: HTTP ports and data channels.

Tests: tests/unit/rpc/test_tls.py.
"""

from __future__ import annotations

import ssl

from kvmesh.core.errors import ConfigError
from kvmesh.rpc.channels import TlsConfig, load_tls_files


def server_context(tls: TlsConfig, section: str) -> ssl.SSLContext | None:
    """What a server shows and demands; None without a certificate (plain text).

    Args:
        section: name of the options, for errors.

    Raises:
        ConfigError: a file cannot be used, or a CA is given without a certificate.
    """
    if not tls.cert:
        if tls.key or tls.ca:
            raise ConfigError(f"{section}.cert is empty; a key or a CA alone encrypts nothing")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_tls_files(context, tls, section)
    if tls.ca and tls.verify_callers:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(tls: TlsConfig, section: str) -> ssl.SSLContext | None:
    """What a client trusts and shows; None without a CA (plain text).

    Args:
        section: name of the options, for errors.

    Raises:
        ConfigError: a file cannot be used.
    """
    if not tls.ca:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_tls_files(context, tls, section)
    return context
