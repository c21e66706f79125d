"""Certificates of hubs and of their users, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


class Authority:
    """Signs client certificates."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.certificate, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        subject = ("-subj", f"/CN={name}", "-keyout", self._key, "-out", self.certificate)
        openssl("req", "-x509", "-days", 2, *KEY, *subject)

    def sign(self, subject: str, alternatives: str = "") -> Path:
        """A file with a certificate and its key."""
        made = self.folder / f"{self.name}-{abs(hash((subject, alternatives)))}"
        asked, key, signed = (made.with_suffix(each) for each in (".csr", ".key", ".crt"))
        openssl("req", *KEY, "-subj", subject, "-keyout", key, "-out", asked)
        extensions = made.with_suffix(".ext")
        extensions.write_text(f"subjectAltName={alternatives}\n" if alternatives else "")
        by = ("-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial", "-days", 2)
        openssl("x509", "-req", "-in", asked, *by, "-extfile", extensions, "-out", signed)
        whole = made.with_suffix(".pem")
        whole.write_text(signed.read_text() + key.read_text())
        return whole


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """The certificate of a server on this machine, signed by itself, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subject = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost")
    openssl("req", "-x509", "-days", 2, *KEY, *subject, "-keyout", key, "-out", certificate)
    return certificate, key
