"""The provider as Ray's cluster launcher and autoscaler use it, on hosts that exist only in the record."""

from __future__ import annotations

import copy
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import ConfigurationError, NodeLost, Unavailable
from tandem.cluster.on_ray.runtime import import_ray
from tandem.cluster.static_hosts.config import bootstrapped, read_provider
from tandem.cluster.static_hosts.shell import HostUnreachable, LocalShell, ScriptFailed, ThroughHead
from tandem.cluster.static_hosts.store import LocalStore, Reach, RemoteStore, is_own_address, reach_from_here, resolve
from tests.cluster.static_hosts.cluster_file import cluster_file
from tests.waiting import until

import_ray()  # Ray reads its environment when it is first imported
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig, IConfigReader  # noqa: E402
from ray.autoscaler.v2.instance_manager.node_provider import LaunchNodeError, NodeProviderAdapter  # noqa: E402

from tandem.cluster.static_hosts.provider import StaticHostsProvider, drain_script, stop_script  # noqa: E402

HEAD = {"ray-node-type": "head", "ray-user-node-type": "head"}
DECODE = {"ray-node-type": "worker", "ray-user-node-type": "decode"}
CONFIG = cluster_file("10.0.0.21", "10.0.0.22") | {"setup_commands": ["install"]}


class NotedHosts:
    """Every host answers, but for the ones in `silent`."""

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self.failing: set[str] = set()
        self.ran: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def run(self, address: str, script: str, *, stdin: bytes = b"", timeout_s: float = 60.0) -> bytes:
        if address in self.silent:
            raise HostUnreachable(f"{address} does not answer over ssh: timed out")
        with self._lock:
            self.ran.append((address, script))
        if address in self.failing:
            raise ScriptFailed(address, "ray: command not found", 127)
        return b""

    def stopped(self) -> list[str]:
        scripts = stop_script("ray stop"), stop_script("ray stop", "10.0.0.10")
        return sorted(address for address, script in self.ran if script in scripts)


@pytest.fixture
def hosts() -> NotedHosts:
    return NotedHosts()


@pytest.fixture
def config() -> dict[str, Any]:
    return bootstrapped(copy.deepcopy(CONFIG))


@pytest.fixture
def provider(hosts: NotedHosts, config: dict[str, Any], tmp_path: Path) -> StaticHostsProvider:
    """After the first half of `ray up`: the head is launched and the file's hosts are known."""
    reach = Reach("10.0.0.10", "203.0.113.7", False, hosts, hosts, LocalStore("tandem", tmp_path))
    provider = StaticHostsProvider(config["provider"], "tandem", reach)
    provider.create_node({}, HEAD, 1)
    provider.prepare_for_head_node(copy.deepcopy(config))
    return provider


def hosts_of(provider: StaticHostsProvider, tags: dict[str, str]) -> list[str]:
    return sorted(provider.internal_ip(node_id) for node_id in provider.non_terminated_nodes(tags))


# --- what Ray is told


def test_the_head_is_found_by_its_tags_and_reached_where_it_is(provider: StaticHostsProvider) -> None:
    (head,) = provider.non_terminated_nodes({"ray-node-type": "head"})
    assert head.startswith("10.0.0.10-")
    assert (provider.is_running(head), provider.is_terminated(head)) == (True, False)
    assert (provider.internal_ip(head), provider.external_ip(head)) == ("10.0.0.10", "203.0.113.7")
    provider.set_node_tags(head, {"ray-node-status": "up-to-date"})
    assert provider.node_tags(head) == HEAD | {"ray-node-status": "up-to-date"}


def test_a_node_that_was_never_there_has_ended(provider: StaticHostsProvider) -> None:
    assert provider.is_terminated("10.0.0.99-0")
    assert provider.node_tags("10.0.0.99-0") == {}
    provider.set_node_tags("10.0.0.99-0", {"a": "b"})
    provider.terminate_node("10.0.0.99-0")
    with pytest.raises(NodeLost, match="is no longer a node of cluster tandem"):
        provider.internal_ip("10.0.0.99-0")


# --- launching


def test_workers_get_hosts_of_their_own_pool_and_one_that_is_launched_again_is_a_new_node(
    provider: StaticHostsProvider,
) -> None:
    provider.create_node({}, DECODE, 2)
    assert hosts_of(provider, DECODE) == ["10.0.0.21", "10.0.0.22"]
    before = set(provider.non_terminated_nodes(DECODE))
    assert all(provider.external_ip(node) == provider.internal_ip(node) for node in before)
    provider.terminate_nodes(list(before))
    provider.create_node({}, DECODE, 2)
    after = set(provider.non_terminated_nodes(DECODE))
    assert len(after) == 2
    assert not before & after


def test_what_can_be_launched_is_launched_and_the_rest_is_explained(
    provider: StaticHostsProvider, hosts: NotedHosts
) -> None:
    hosts.silent = {"10.0.0.21"}
    with pytest.raises(Unavailable, match=r"decode: 1 of 2 nodes launched: 10\.0\.0\.21 does not answer"):
        provider.create_node({}, DECODE, 2)
    assert hosts_of(provider, DECODE) == ["10.0.0.22"]
    hosts.silent = set()
    provider.create_node({}, DECODE, 1)
    with pytest.raises(Unavailable, match="decode: 0 of 1 nodes launched: every host of that type is in use"):
        provider.create_node({}, DECODE, 1)


def test_launches_at_the_same_time_never_share_a_host(provider: StaticHostsProvider) -> None:
    together = threading.Barrier(4)

    def launch() -> None:
        together.wait(timeout=10)
        try:
            provider.create_node({}, DECODE, 1)
        except Unavailable:
            return

    launches = [threading.Thread(target=launch) for _ in range(4)]
    for thread in launches:
        thread.start()
    for thread in launches:
        thread.join(timeout=10)
    assert hosts_of(provider, DECODE) == ["10.0.0.21", "10.0.0.22"]


# --- ending


def test_ending_a_node_stops_ray_on_its_host_and_no_other(provider: StaticHostsProvider, hosts: NotedHosts) -> None:
    provider.create_node({}, DECODE, 2)
    first, second = provider.non_terminated_nodes(DECODE)
    provider.terminate_node(first)
    assert hosts.stopped() == ["10.0.0.21"]
    assert provider.non_terminated_nodes(DECODE) == [second]
    provider.terminate_nodes(provider.nodes_for_teardown({"ray-node-type": "head"}))
    assert hosts.stopped() == ["10.0.0.21", "203.0.113.7"], "the head where it is reached"
    assert provider.non_terminated_nodes(HEAD) == []


@pytest.mark.parametrize("trouble", ["silent", "failing"])
def test_a_host_where_ray_cannot_be_stopped_is_given_back_and_named(
    provider: StaticHostsProvider, hosts: NotedHosts, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    provider.create_node({}, DECODE, 2)
    getattr(hosts, trouble).add("10.0.0.21")
    provider.terminate_nodes(provider.non_terminated_nodes(DECODE))
    assert provider.non_terminated_nodes(DECODE) == []
    assert "10.0.0.21" in caplog.text


# --- `ray up` again


def test_a_host_that_is_added_can_be_launched_and_one_that_is_taken_out_is_stopped_and_no_other(
    provider: StaticHostsProvider, config: dict[str, Any], hosts: NotedHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    provider.create_node({}, DECODE, 2)
    listed = config["available_node_types"]["decode"]["node_config"]["hosts"]
    listed.append("10.0.0.23")
    provider.prepare_for_head_node(config)
    provider.create_node({}, DECODE, 1)
    assert hosts_of(provider, DECODE) == ["10.0.0.21", "10.0.0.22", "10.0.0.23"]
    listed.remove("10.0.0.21")
    provider.prepare_for_head_node(config)
    assert hosts.stopped() == ["10.0.0.21"]
    assert hosts_of(provider, {}) == ["10.0.0.10", "10.0.0.22", "10.0.0.23"]
    assert "10.0.0.21 is no longer listed for decode" in capsys.readouterr().out


def test_a_host_that_did_not_answer_when_it_was_taken_out_is_stopped_as_soon_as_it_does(
    provider: StaticHostsProvider,
    hosts: NotedHosts,
    config: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Within two minutes Ray does not notice that it was away: it would go on there, on a host that is no longer listed."""
    store = LocalStore("tandem", tmp_path)
    autoscaler = StaticHostsProvider(
        config["provider"], "tandem", Reach("10.0.0.10", "10.0.0.10", True, hosts, hosts, store)
    )
    provider.create_node({}, DECODE, 2)
    listed = config["available_node_types"]["decode"]["node_config"]["hosts"]
    for host in list(listed):
        hosts.silent.add(host)
        listed.remove(host)
    provider.prepare_for_head_node(config)
    assert "10.0.0.21, 10.0.0.22 will be stopped when the head reaches" in capsys.readouterr().out
    assert hosts_of(autoscaler, DECODE) == []
    hosts.silent.remove("10.0.0.22")

    def stopped(*expected: str) -> bool:
        autoscaler.non_terminated_nodes({})
        return hosts.stopped() == [*expected]

    until(lambda: stopped("10.0.0.22"))
    until(lambda: store.read().unstopped.keys() == {"10.0.0.21"})
    listed.append("10.0.0.21")
    provider.prepare_for_head_node(config)
    assert store.read().unstopped == {}, "it is stopped before Ray is started there"


@pytest.mark.parametrize("head", ["10.0.0.10", "10.0.0.1"])
def test_what_is_stopped_later_is_the_own_clusters(head: str, tmp_path: Path) -> None:
    """When it answers again, another cluster may have the host."""
    stopped, raylet = tmp_path / "stopped", f"raylet --gcs-address={head}:6379"
    with subprocess.Popen([raylet, "60"], executable="/bin/sleep") as runs:
        subprocess.run(stop_script(f"touch {stopped}", "10.0.0.10"), shell=True, check=True, timeout=60)
        runs.kill()
    assert stopped.exists() == (head == "10.0.0.10")


def test_a_host_that_is_taken_out_while_ray_is_being_started_there_is_stopped_again(
    provider: StaticHostsProvider, hosts: NotedHosts, config: dict[str, Any]
) -> None:
    started = list(provider.create_node({}, DECODE, 2))
    leaving = next(node for node in started if provider.internal_ip(node) == "10.0.0.22")
    config["available_node_types"]["decode"]["node_config"]["hosts"] = ["10.0.0.21"]
    provider.prepare_for_head_node(config)
    assert hosts.stopped() == ["10.0.0.22"]
    for node in started:
        provider.set_node_tags(node, {"ray-node-status": "setting-up"})
    assert hosts.stopped() == ["10.0.0.22"]
    # The autoscaler's start commands were on their way, and are over only now.
    for node in started:
        provider.set_node_tags(node, {"ray-node-status": "up-to-date"})
    assert hosts.stopped() == ["10.0.0.22", "10.0.0.22"]
    assert leaving not in provider.non_terminated_nodes({})


def test_a_host_that_was_launched_again_is_not_stopped_for_an_older_launch(
    provider: StaticHostsProvider, hosts: NotedHosts
) -> None:
    (older, *_) = provider.create_node({}, DECODE, 2)
    provider.terminate_node(older)
    stopped = hosts.stopped()
    provider.create_node({}, DECODE, 1)
    provider.set_node_tags(older, {"ray-node-status": "up-to-date"})
    assert hosts.stopped() == stopped


def test_what_runs_on_a_host_that_is_taken_out_is_finished_before_ray_is_stopped_there(
    provider: StaticHostsProvider, config: dict[str, Any], hosts: NotedHosts
) -> None:
    provider.create_node({}, DECODE, 2)
    config["available_node_types"]["decode"]["node_config"]["hosts"].clear()
    hosts.ran.clear()
    provider.prepare_for_head_node(config)
    drain = ("203.0.113.7", drain_script(["10.0.0.21", "10.0.0.22"]))
    assert hosts.ran[0] == drain, "on the head, and first"
    assert hosts.stopped() == ["10.0.0.21", "10.0.0.22"]
    assert "tandem drain 10.0.0.21 --timeout 60 & tandem drain 10.0.0.22 --timeout 60 & wait" in drain[1]


def test_a_head_that_cannot_drain_does_not_keep_hosts_from_leaving(
    provider: StaticHostsProvider, config: dict[str, Any], hosts: NotedHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    provider.create_node({}, DECODE, 2)
    config["available_node_types"]["decode"]["node_config"]["hosts"].remove("10.0.0.21")
    hosts.silent.add("203.0.113.7")
    provider.prepare_for_head_node(config)
    assert hosts.stopped() == ["10.0.0.21"]
    assert "could not be drained" in capsys.readouterr().out


def test_the_head_gets_a_file_that_works_there(provider: StaticHostsProvider, config: dict[str, Any]) -> None:
    config["auth"]["ssh_private_key"] = "~/ray_bootstrap_key.pem"  # Ray does this before it asks
    prepared = provider.prepare_for_head_node(config)
    assert prepared["provider"]["ssh"]["private_key"] == "~/ray_bootstrap_key.pem"
    assert prepared["setup_commands"] == []  # or Ray would run them twice
    read_provider(prepared["provider"])


# --- where it is asked


def test_under_ray_on_the_head_the_head_is_a_node_even_without_a_record(
    hosts: NotedHosts, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_CLOUD_INSTANCE_ID", "10.0.0.10-cafe")
    monkeypatch.setenv("RAY_NODE_TYPE_NAME", "head")
    store = LocalStore("tandem", tmp_path)
    reach = Reach("10.0.0.10", "10.0.0.10", True, hosts, hosts, store)
    for _ in range(2):
        provider = StaticHostsProvider(config["provider"], "tandem", reach)
        assert provider.non_terminated_nodes(HEAD) == ["10.0.0.10-cafe"]
    monkeypatch.setenv("RAY_CLOUD_INSTANCE_ID", "10.0.0.10-beef")  # it was launched again
    provider = StaticHostsProvider(config["provider"], "tandem", reach)
    assert provider.non_terminated_nodes({}) == ["10.0.0.10-beef"]


def test_the_head_opens_the_record_and_others_ask_it_for_it(config: dict[str, Any]) -> None:
    section = config["provider"] | {"head_ip": "127.0.0.1"}
    here = reach_from_here(read_provider(section), "tandem")
    assert (type(here.to_head), type(here.store)) == (LocalShell, LocalStore)
    section = config["provider"] | {"head_ip": "192.0.2.1", "external_head_ip": "192.0.2.2"}
    there = reach_from_here(read_provider(section), "tandem")
    assert (type(there.to_workers), type(there.store)) == (ThroughHead, RemoteStore)
    assert (there.head_address, there.entrance) == ("192.0.2.1", "192.0.2.2")


def test_an_address_is_our_own_when_it_can_be_bound_and_a_name_that_does_not_resolve_is_refused() -> None:
    assert is_own_address("127.0.0.1")
    assert not is_own_address("192.0.2.1")  # reserved for documentation
    assert resolve("127.0.0.1") == "127.0.0.1"
    with pytest.raises(ConfigurationError, match=r"no-such-host\.invalid is neither"):
        resolve("no-such-host.invalid")
    with pytest.raises(ConfigurationError, match=r"provider\.ssh is missing"):
        StaticHostsProvider(CONFIG["provider"], "tandem")  # it did not come through `ray up`


# --- under Ray's autoscaler


class FixedConfig(IConfigReader):  # type: ignore[misc]
    def __init__(self, config: AutoscalingConfig) -> None:
        self._config = config

    def get_cached_autoscaling_config(self) -> AutoscalingConfig:
        return self._config

    def refresh_cached_autoscaling_config(self) -> None:
        return


def test_rays_autoscaler_launches_and_ends_through_it(
    provider: StaticHostsProvider, hosts: NotedHosts, config: dict[str, Any], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.touch()
    config["auth"]["ssh_private_key"] = str(key)
    for name in ("file_mounts", "cluster_synced_files", "initialization_commands"):
        config[name] = {} if name == "file_mounts" else []
    for name in ("head_setup_commands", "worker_setup_commands"):
        config[name] = []
    adapter = NodeProviderAdapter(provider, FixedConfig(AutoscalingConfig(config, skip_content_hash=True)))
    hosts.silent = {"10.0.0.22"}
    adapter._launch_nodes_by_type("decode", 2, "request-1")
    nodes = adapter.get_non_terminated()
    launched = [node for node in nodes.values() if node.node_type == "decode"]
    assert [(node.is_running, node.request_id) for node in launched] == [(True, "request-1")]
    (error,) = adapter.poll_errors()
    assert isinstance(error, LaunchNodeError)
    assert "10.0.0.22 does not answer" in repr(error)
    adapter._do_terminate([launched[0].cloud_instance_id], "request-2")
    assert [node.node_type for node in adapter.get_non_terminated().values()] == ["head"]
    assert adapter.poll_errors() == []
