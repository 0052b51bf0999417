"""manifests/ray/static.yaml through `ray up`, serving SmolLM2 on a head, two prefill hosts and two decode hosts. The
tests follow one another on one cluster; each leaves two hosts of each kind behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml
from lab import ROOT, Host, Lab
from serving import Client, give_model
from static_cluster import StaticCluster

from tests.listening import named_in_the_table, program_of
from tests.waiting import until

pytestmark = [pytest.mark.timeout(600), pytest.mark.integration]

JOIN_S = 150.0  # Ray starts on a host, and a node on it loads the model, on very few cores
NOTICE_S = 15.0
BOOTED_S = 90.0  # until Ray notices that a host has booted, or was healed, and has stopped what it ran there


@pytest.fixture(scope="module")
def serving(lab: Lab, smollm2_path: Path) -> StaticCluster:
    """What `ray up` leaves behind."""
    settings = {
        "model": str(give_model(lab, smollm2_path)),
        "cache": {"memory_bytes": "256MiB"},
        "pools": {"prefill": {"nodes": None}, "decode": {"nodes": None}},
        "router": {"local_prefill": "never"},
    }
    cluster = StaticCluster(lab, settings)
    _, prefill_1, prefill_2, decode_1, decode_2, _ = lab.hosts
    said = cluster.up(prefill=[prefill_1, prefill_2], decode=[decode_1, decode_2])
    assert f"API:     {cluster.url}/v1" in said
    return cluster


@pytest.fixture
def pools(serving: StaticCluster) -> dict[str, list[Host]]:
    _, prefill_1, prefill_2, decode_1, decode_2, _ = serving.lab.hosts
    return {"prefill": [prefill_1, prefill_2], "decode": [decode_1, decode_2]}


@pytest.fixture
def client(serving: StaticCluster) -> Client:
    return Client(serving.lab, serving.url)


def test_the_router_answers_when_ray_up_is_over_and_every_host_carries_a_node(
    serving: StaticCluster, client: Client
) -> None:
    assert "Paris" in client.complete("The capital of France is the city of")
    client.wait_for_nodes(prefill=2, decode=2, within_s=JOIN_S)
    said = serving.tandem("status")
    assert "decode: 2 of 2 nodes ready" in said
    for host in serving.lab.hosts[1:5]:
        assert host.address in said


def test_a_decode_host_added_to_the_file_serves_and_taken_out_again_is_drained(
    serving: StaticCluster, client: Client, pools: dict[str, list[Host]]
) -> None:
    spare = serving.lab.hosts[5]
    with client.load():
        serving.up(prefill=pools["prefill"], decode=[*pools["decode"], spare])
        client.wait_for_nodes(prefill=2, decode=3, within_s=JOIN_S)
        said = serving.up(**pools)
        assert "everything was finished" in said
        client.wait_for_nodes(prefill=2, decode=2, within_s=NOTICE_S)
    assert spare.run("sh", "-c", "pgrep -f '[r]ay::' || true") == ""


def test_a_host_that_is_cut_off_is_left_alone_and_goes_on_when_it_is_healed(
    serving: StaticCluster, client: Client, pools: dict[str, list[Host]]
) -> None:
    """Ray does not give it up: it would end what runs there, which serves as soon as it is reached again."""
    lost, _ = pools["decode"]
    with client.load():
        lost.cut_off()
        try:
            client.wait_for_nodes(prefill=2, decode=1, within_s=NOTICE_S)
        finally:
            lost.heal()
        client.wait_for_nodes(prefill=2, decode=2, within_s=JOIN_S)
    serving.probe.wait_for_pools(pools, NOTICE_S)


def test_a_host_that_boots_again_under_load_serves_again(
    serving: StaticCluster, client: Client, pools: dict[str, list[Host]]
) -> None:
    lost, _ = pools["decode"]
    before = client.epochs()
    with client.load():
        lost.cut_off()
        lost.power_off()
        client.wait_for_nodes(prefill=2, decode=1, within_s=NOTICE_S)
        lost.boot()
        lost.heal()
        client.wait_for_nodes(prefill=2, decode=2, within_s=JOIN_S + BOOTED_S)
    assert len(before.items() & client.epochs().items()) == 3, "no other node was started again"
    assert f"its machine {lost.address} is gone" in serving.tandem("status")


def test_a_host_that_is_taken_out_while_it_is_cut_off_is_stopped_when_it_is_healed(
    serving: StaticCluster, client: Client, pools: dict[str, list[Host]]
) -> None:
    kept, lost = pools["decode"]
    with client.load():
        lost.cut_off()
        try:
            said = serving.up(prefill=pools["prefill"], decode=[kept])
        finally:
            lost.heal()
        assert f"{lost.address} will be stopped when the head reaches it again" in said
        until(lambda: not lost.run("sh", "-c", "pgrep -f '[r]aylet|[r]ay::' || true"), BOOTED_S)
        serving.up(**pools)
        client.wait_for_nodes(prefill=2, decode=2, within_s=JOIN_S)


def test_the_token_is_in_no_log(serving: StaticCluster) -> None:
    token = (serving.lab.laptop_home / ".ray" / "auth_token").read_text().strip()
    for host in serving.lab.hosts:
        assert host.run("sh", "-c", f"grep -rl {token} /tmp/ray || true") == ""


def test_every_host_listens_as_the_page_of_ports_says(serving: StaticCluster, client: Client) -> None:
    """What Tandem opens is on its host's own address, the router's port on the head's. Ray has one port on every interface in each process."""
    client.complete("Keys and values travel, so that every socket is there: " * 4)
    names = named_in_the_table()
    seen: set[str] = set()
    for host in serving.lab.hosts[:5]:
        for program, addresses in listening_on(host).items():
            assert program in names, f"{program} listens on {host.name} at {addresses} and is not in the table"
            seen.add(program)
            if program in ("ray::RouterActor", "ray::PrefillActor", "ray::DecodeActor"):
                own = [one for one in addresses if one.rpartition(":")[0] == host.address]
                others = [one for one in addresses if one not in own]
                assert own
                assert len(others) == 1, f"{program} on {host.name}: {others}"
    assert {"ray::RouterActor", "ray::PrefillActor", "ray::DecodeActor", "raylet", "gcs_server"} <= seen
    assert f"{serving.head.address}:8000" in listening_on(serving.head)["ray::RouterActor"]


def listening_on(host: Host) -> dict[str, list[str]]:
    """Addresses by program, as `ss` says; sshd is the lab's own."""
    commands = {
        pid: command
        for pid, _, command in (
            line.strip().partition(" ") for line in host.run("ps", "-eo", "pid=,args=").splitlines()
        )
    }
    found: dict[str, list[str]] = {}
    for line in host.run("ss", "--no-header", "--listening", "--tcp", "--numeric", "--processes").splitlines():
        pid = line.partition("pid=")[2].partition(",")[0]
        program = program_of(commands[pid])
        if not program.startswith("sshd"):
            found.setdefault(program, []).append(line.split()[3])
    return found


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_pod_that_is_evicted_loses_no_answer_and_changes_none(
    serving: StaticCluster, client: Client, pools: dict[str, list[Host]], role: str
) -> None:
    """A host in a pod's place, as KubeRay ends it: the file's hook, SIGTERM to Ray, which is the container's process, and SIGKILL to all
    that is left when its grace is over."""
    group = next(
        group["template"]["spec"]
        for group in yaml.safe_load((ROOT / "manifests/kuberay/base/raycluster.yaml").read_text())["spec"][
            "workerGroupSpecs"
        ]
        if group["groupName"] == role
    )
    hook = group["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    pod = serving.lab.hosts[5]
    with client.load():
        serving.up(**{**pools, role: [*pools[role], pod]})
        client.wait_for_nodes(**{"prefill": 2, "decode": 2, role: 3}, within_s=JOIN_S)
        ends = time.monotonic() + group["terminationGracePeriodSeconds"]
        pod.run("env", f"POD_IP={pod.address}", "RAY_AUTH_MODE=token", *hook, timeout_s=ends - time.monotonic())
        pod.run("pkill", "-TERM", "-x", "raylet")
        while time.monotonic() < ends and pod.run("sh", "-c", "pgrep -f '[r]aylet|[r]ay::' || true"):
            time.sleep(0.2)
        pod.power_off()
        client.wait_for_nodes(prefill=2, decode=2, within_s=NOTICE_S)
    pod.boot()
    serving.up(**pools)


def test_ray_down_leaves_nothing_running(serving: StaticCluster) -> None:
    serving.tandem("down")
    serving.down()
    left = "ps -eo args | grep -E '[g]cs_server|[r]aylet|[r]ay::' || true"
    assert {host.name: host.run("sh", "-c", left) for host in serving.lab.hosts} == dict.fromkeys(
        [host.name for host in serving.lab.hosts], ""
    )
