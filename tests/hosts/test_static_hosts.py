"""manifests/ray/static.yaml through `ray up`, on a head and several hosts. The tests follow one another on one
cluster; each leaves two prefill hosts and two decode hosts behind."""

from __future__ import annotations

import json

import pytest
from lab import Host
from static_cluster import StaticCluster

pytestmark = [pytest.mark.timeout(600), pytest.mark.integration]

JOIN_S = 120.0
LEAVE_S = 30.0
LOST_S = 200.0  # Ray bears with a host that is cut off for two minutes


@pytest.fixture
def pools(cluster: StaticCluster) -> dict[str, list[Host]]:
    _, prefill_1, prefill_2, decode_1, decode_2, _ = cluster.lab.hosts
    return {"prefill": [prefill_1, prefill_2], "decode": [decode_1, decode_2]}


@pytest.fixture
def spare(cluster: StaticCluster) -> Host:
    return cluster.lab.hosts[5]


def raylets(hosts: list[Host]) -> dict[str, str]:
    """Who restarts Ray on a host gets another process there."""
    return {host.name: host.run("sh", "-c", "pgrep -x raylet || true").strip() for host in hosts}


def addresses(hosts: list[Host]) -> list[str]:
    return sorted(host.address for host in hosts)


def test_ray_up_makes_two_pools_out_of_their_hosts(cluster: StaticCluster, pools: dict[str, list[Host]]) -> None:
    cluster.probe.wait_for_pools(pools, JOIN_S)
    for pool, hosts in pools.items():
        assert cluster.probe.run_in_pool(pool, len(hosts), within_s=60) == addresses(hosts)


def test_who_has_no_token_is_refused(cluster: StaticCluster) -> None:
    script = 'import ray; ray.init(address="auto", log_to_driver=False); print("let in")'
    with pytest.raises(AssertionError, match=r"(?i)auth|token"):
        cluster.head.run("env", "RAY_AUTH_MODE=token", "RAY_AUTH_TOKEN=wrong", "python", "-c", script, timeout_s=90)


def test_the_token_is_in_no_log(cluster: StaticCluster, pools: dict[str, list[Host]]) -> None:
    token = (cluster.lab.laptop_home / ".ray" / "auth_token").read_text().strip()
    assert len(token) >= 32
    for host in [cluster.head, *pools["prefill"], *pools["decode"]]:
        assert host.run("sh", "-c", f"grep -rl {token} /tmp/ray || true") == ""
        assert host.run("sh", "-c", "stat -c %a ~/.ray/auth_token").strip() == "600"


def test_the_dashboard_listens_on_loopback_alone(cluster: StaticCluster) -> None:
    listening = cluster.head.run("ss", "--no-header", "-ltn", "sport", "=", ":8265").splitlines()
    assert [line.split()[3] for line in listening] == ["127.0.0.1:8265"]


def test_a_decode_host_added_to_the_file_joins_its_pool_and_disturbs_nobody(
    cluster: StaticCluster, pools: dict[str, list[Host]], spare: Host
) -> None:
    every_host = [cluster.head, *pools["prefill"], *pools["decode"]]
    before = raylets(every_host)
    more = [*pools["decode"], spare]
    cluster.up(prefill=pools["prefill"], decode=more)
    cluster.probe.wait_for_pools({"prefill": pools["prefill"], "decode": more}, JOIN_S)
    assert cluster.probe.run_in_pool("decode", 3, within_s=60) == addresses(more)
    assert raylets(every_host) == before


def test_a_decode_host_taken_out_of_the_file_leaves_and_no_other(
    cluster: StaticCluster, pools: dict[str, list[Host]], spare: Host
) -> None:
    every_host = [cluster.head, *pools["prefill"], *pools["decode"]]
    before = raylets(every_host)
    cluster.up(prefill=pools["prefill"], decode=pools["decode"])
    cluster.probe.wait_for_pools(pools, LEAVE_S)
    assert raylets([spare]) == {spare.name: ""}
    assert raylets(every_host) == before


def test_a_host_on_standby_is_started_for_work_and_goes_back_after_it(
    cluster: StaticCluster, pools: dict[str, list[Host]], spare: Host
) -> None:
    more = [*pools["decode"], spare]
    cluster.up(prefill=pools["prefill"], decode=more, standby=1)
    cluster.probe.wait_for_pools(pools, LEAVE_S)
    assert cluster.probe.run_in_pool("decode", 3, within_s=JOIN_S) == addresses(more)
    cluster.probe.wait_for_count("decode", 2, within_s=JOIN_S)  # which two is for Ray to choose
    cluster.up(prefill=pools["prefill"], decode=pools["decode"])
    cluster.probe.wait_for_pools(pools, JOIN_S)
    assert raylets([spare]) == {spare.name: ""}


def test_a_host_that_is_cut_off_for_long_is_out_and_back_when_it_is_healed(
    cluster: StaticCluster, pools: dict[str, list[Host]]
) -> None:
    lost, left = pools["decode"]
    lost.cut_off()
    try:
        cluster.probe.wait_for_pools({"prefill": pools["prefill"], "decode": [left]}, LOST_S)
        assert cluster.probe.run_in_pool("decode", 1, within_s=60) == [left.address]
    finally:
        lost.heal()
    cluster.probe.wait_for_pools(pools, JOIN_S)
    assert cluster.probe.run_in_pool("decode", 2, within_s=60) == addresses(pools["decode"])


def test_a_host_that_loses_power_is_back_when_it_has_booted(
    cluster: StaticCluster, pools: dict[str, list[Host]]
) -> None:
    lost, left = pools["prefill"]
    lost.power_off()
    cluster.probe.wait_for_pools({"prefill": [left], "decode": pools["decode"]}, LOST_S)
    lost.boot()
    cluster.probe.wait_for_pools(pools, JOIN_S)
    assert cluster.probe.run_in_pool("prefill", 2, within_s=60) == addresses(pools["prefill"])


def test_ray_down_leaves_nothing_running(cluster: StaticCluster, pools: dict[str, list[Host]]) -> None:
    cluster.down()
    every_host = [cluster.head, *pools["prefill"], *pools["decode"]]
    left = "ps -eo args | grep -E '[g]cs_server|[r]aylet|[r]ay::' || true"
    assert {host.name: host.run("sh", "-c", left) for host in every_host} == dict.fromkeys(raylets(every_host), "")
    assert json.loads(cluster.head.run("sh", "-c", "cat ~/.tandem/clusters/tandem.json"))["nodes"] == {}


def test_ray_up_after_ray_down_starts_afresh(cluster: StaticCluster, pools: dict[str, list[Host]]) -> None:
    smaller = {name: hosts[:1] for name, hosts in pools.items()}
    cluster.up(**smaller)
    cluster.probe.wait_for_pools(smaller, JOIN_S)
    cluster.down()
