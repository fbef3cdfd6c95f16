"""A certificate for servers on this machine, made for one test run."""

import functools
import ssl
import subprocess
import tempfile
from pathlib import Path


@functools.cache
def certificate() -> tuple[Path, Path]:
    """(certificate, key) for localhost and 127.0.0.1; the certificate is its own authority."""
    folder = Path(tempfile.mkdtemp(prefix="certificate-"))
    made, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(key), "-out", str(made), "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return made, key


def server_context() -> ssl.SSLContext:
    """What a server needs to speak TLS with this certificate; clients trust it where SSL_CERT_FILE names it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate())
    return context
