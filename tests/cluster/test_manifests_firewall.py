"""nftables accepts the shipped firewall, which opens the ports that the settings name."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tandem.router.config import RouterConfig

FILE = Path(__file__).parents[2] / "manifests/firewall/tandem.nft"


def test_nftables_takes_it() -> None:
    if shutil.which("nft") is None or shutil.which("unshare") is None:
        pytest.skip("nftables or unshare is not installed here")
    checked = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--net", "nft", "--check", "--file", str(FILE)],
        capture_output=True,
        text=True,
        timeout=20,
    )
    if "unshare failed" in checked.stderr:
        pytest.skip(f"no network namespace can be made here: {checked.stderr}")
    assert checked.returncode == 0, checked.stderr


def test_strangers_reach_the_routers_port_and_ssh() -> None:
    (opened,) = re.findall(r"tcp dport \{([^}]*)\} accept", FILE.read_text())
    router = RouterConfig(tokenizer_path="model", model_name="model")
    assert {int(port) for port in opened.split(",")} == {22, router.port}
