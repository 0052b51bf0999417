"""manifests/ray/static.yaml through `ray up`, with a prefill node whose ranks are on three hosts and a decode node on a fourth. The tests
follow one another on one cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab import Lab
from serving import Client, give_model
from static_cluster import StaticCluster
from test_serving_hosts import listening_on

from tests.listening import named_in_the_table
from tests.waiting import until

pytestmark = [pytest.mark.timeout(900), pytest.mark.integration]

JOIN_S = 240.0  # Ray starts on three hosts, and a rank on each loads the model, on very few cores
NOTICE_S = 15.0


@pytest.fixture(scope="module")
def serving(lab: Lab, smollm2_path: Path) -> StaticCluster:
    settings = {
        # It has three heads of keys and values.
        "model": {"path": str(give_model(lab, smollm2_path)), "dtype": "float32"},
        "cache": {"memory_bytes": "96MiB"},
        "scheduler": {"max_model_len": 1024},
        "pools": {"prefill": {"nodes": 1, "tensor_parallel": 3, "machines": 3}, "decode": {"nodes": 1}},
        "router": {"local_prefill": "never"},
    }
    cluster = StaticCluster(lab, settings)
    cluster.up(prefill=lab.hosts[1:4], decode=[lab.hosts[4]])
    return cluster


@pytest.fixture
def client(serving: StaticCluster) -> Client:
    return Client(serving.lab, serving.url)


def test_each_host_has_a_rank_and_listens_as_the_page_of_ports_says(serving: StaticCluster, client: Client) -> None:
    client.wait_for_nodes(prefill=1, decode=1, within_s=JOIN_S)
    assert "Paris" in client.complete("The capital of France is the city of")
    hosts = serving.lab.hosts[1:4]
    assert " + ".join(sorted(host.address for host in hosts)) in serving.tandem("status")
    keepers = 0
    for host in hosts:
        for program, addresses in listening_on(host).items():
            assert program in named_in_the_table()
            if program in ("ray::PrefillActor", "ray::RanksActor", "python"):
                own = [one for one in addresses if one.rpartition(":")[0] == host.address]
                # Ray's port is one of each of its processes.
                assert len(addresses) - len(own) == (program != "python"), f"{program}: {addresses}"
                keepers += program == "ray::RanksActor"
    assert keepers == 2


def test_a_host_that_is_cut_off_ends_the_node_which_comes_back_when_it_is_healed(
    serving: StaticCluster, client: Client
) -> None:
    lost = next(host for host in serving.lab.hosts[1:4] if "RanksActor" in str(listening_on(host)))
    before = client.epochs()
    with client.load():
        lost.cut_off()
        try:
            client.wait_for_nodes(prefill=0, decode=1, within_s=NOTICE_S)
            until(lambda: "ranks.process" not in lost.run("ps", "-eo", "args="), JOIN_S)
        finally:
            lost.heal()
        client.wait_for_nodes(prefill=1, decode=1, within_s=JOIN_S)
    after = client.epochs()
    assert {name for name in before if after.get(name) != before[name]} == {"prefill-0"}


def test_nothing_is_left_on_any_host(serving: StaticCluster) -> None:
    serving.tandem("down")
    for host in serving.lab.hosts[1:4]:
        until(lambda: "ranks.process" not in host.run("ps", "-eo", "args="), JOIN_S)  # noqa: B023
        until(lambda: "ray::RanksActor" not in host.run("ps", "-eo", "args="), JOIN_S)  # noqa: B023
