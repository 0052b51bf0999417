"""A head that loses its power and is started again, with Ray's persistent store: nodes and the other machines' routers go
on, and the new controller finds them."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import yaml
from lab import RAY, TANDEM, Host, Lab
from serving import Client, give_model

pytestmark = [pytest.mark.timeout(600), pytest.mark.integration]

START_S = 180.0


def ray(host: Host, *words: str, timeout_s: float = 120.0) -> str:
    """`ray start`, as a machine's own start-up would run it."""
    environment = (
        "RAY_AUTH_MODE=token",
        "RAY_gcs_storage=rocksdb",
        f"RAY_gcs_storage_path={host.home}/gcs",
        # Nodes wait this long for a head that is away.
        "RAY_gcs_rpc_server_reconnect_timeout_s=300",
    )
    common = ("--disable-usage-stats", "--object-store-memory=80000000", f"--node-ip-address={host.address}")
    return host.run("env", *environment, *RAY, "start", *common, *words, timeout_s=timeout_s)


def start_head(head: Host) -> None:
    ray(head, "--head", "--port=6379", "--dashboard-host=127.0.0.1", "--include-dashboard=false", "--num-cpus=0")


@pytest.fixture(scope="module")
def machines(lab: Lab, smollm2_path: Path) -> list[Host]:
    """A head, a prefill host and a decode host, with a router on each."""
    head, prefill, decode = machines = lab.hosts[:3]
    model = give_model(lab, smollm2_path)
    settings = {
        "model": str(model),
        "cache": {"memory_bytes": "256MiB"},
        "pools": {"prefill": {"nodes": None}, "decode": {"nodes": None}},
        "router": {"local_prefill": "never", "placement": "every_host"},
    }
    file = lab.folder / "tandem.yaml"
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    head.run("env", "RAY_AUTH_MODE=token", *RAY, "get-auth-token", "--generate")
    for host in machines[1:]:
        (host.home / ".ray").mkdir(exist_ok=True)
        shutil.copy(head.home / ".ray" / "auth_token", host.home / ".ray" / "auth_token")
    start_head(head)
    address = f"--address={head.address}:6379"
    ray(prefill, address, "--num-cpus=0", """--resources={"prefill": 1}""")
    ray(decode, address, "--num-cpus=0", """--resources={"decode": 1}""")
    serve(head, file)
    return machines


def serve(head: Host, file: Path) -> str:
    return head.run(
        "env", "RAY_AUTH_MODE=token", *TANDEM, "serve", "--address", "auto", "--detach",
        "--config", str(file), "--host", head.address, timeout_s=START_S,
    )  # fmt: skip


def test_nodes_and_routers_go_on_without_the_head_and_are_found_by_the_next(lab: Lab, machines: list[Host]) -> None:
    head, _, decode = machines
    there = Client(lab, f"http://{decode.address}:8000")
    there.wait_for_nodes(prefill=1, decode=1, within_s=START_S)
    before = there.epochs()
    head.power_off()
    assert "Paris" in there.complete("The capital of France is the city of")
    head.boot()
    start_head(head)
    back = Client(lab, f"http://{head.address}:8000")
    back.wait_for_nodes(prefill=1, decode=1, within_s=START_S)
    assert "Paris" in back.complete("The capital of France is the city of")
    assert back.epochs() == before, "no node was started again"
    assert there.epochs() == before
    deadline = time.monotonic() + START_S
    while "took over 2 nodes" not in (said := head.run("env", "RAY_AUTH_MODE=token", *TANDEM, "status")):
        assert time.monotonic() < deadline, said
        time.sleep(1)  # the controller announces nothing to other processes
