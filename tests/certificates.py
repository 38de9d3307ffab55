"""Certificates that vouch for a server on loopback."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest


def certificate(folder: Path, name: str = "IP:127.0.0.1") -> ssl.SSLContext:
    """A server's own, with `ca.crt` and a token in the folder where a service account has them."""
    folder.mkdir(exist_ok=True)
    key, crt = folder / "key.pem", folder / "ca.crt"
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate: apt-get install openssl")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", crt, "-days", "1", "-subj",
         "/CN=plimsoll", "-addext", f"subjectAltName={name}"],
        capture_output=True, check=True,
    )  # fmt: skip
    (folder / "token").write_text("a-token")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(crt, key)
    return context
