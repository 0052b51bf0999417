"""Certificates for tests of TLS, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest


class Pair(NamedTuple):
    certificate: Path
    key: Path

    def copy_to(self, other: Pair) -> None:
        """As a renewal does: each file is replaced whole."""
        for mine, its in zip(self, other, strict=True):
            fresh = its.with_suffix(".new")
            shutil.copy(mine, fresh)
            fresh.replace(its)


def make_pair(folder: Path, name: str) -> Pair:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificates, is not installed here")
    pair = Pair(folder / "tls.crt", folder / "tls.key")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "9",
         "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", pair.key, "-out", pair.certificate],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    return pair
