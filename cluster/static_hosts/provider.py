"""A node provider for `ray up` and Ray's autoscaler whose hosts exist already.

    provider: {type: external, module: tandem.cluster.static_hosts.provider.StaticHostsProvider, head_ip: 10.0.0.10}

Ray uses two instances of this class: one where `ray up` and `ray down` run, one in the autoscaler on the head. Both answer from the record on
the head's host. Launching a node means taking a free host of its type and giving it a new id; Ray then copies files there and runs the start
commands. Terminating a node means stopping Ray on its host and freeing the host.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from types import TracebackType
from typing import Any

import msgspec
from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    STATUS_UP_TO_DATE,
    STATUS_UPDATE_FAILED,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

from tandem.base.errors import NodeLost, TandemError, Unavailable
from tandem.cluster.static_hosts.config import bootstrapped, pools_of, read_provider, ssh_settings
from tandem.cluster.static_hosts.record import (
    ClusterRecord,
    LaunchRecord,
    new_node_id,
    stranded_nodes,
    with_hosts,
    with_node,
    with_tags,
    with_unstopped,
    without_nodes,
    without_unstopped,
)
from tandem.cluster.static_hosts.shell import CONNECT_TIMEOUT_S, ScriptFailed
from tandem.cluster.static_hosts.store import Reach, reach_from_here, resolve

_PROBE_TIMEOUT_S = CONNECT_TIMEOUT_S + 5.0
_DRAIN_S = 60.0  # for the requests on a host that was removed from the file
_DRAIN_TIMEOUT_S = _DRAIN_S + 60.0
_STOP_TIMEOUT_S = 60.0  # `ray stop` waits for its processes before it kills them
_AT_ONCE = 16  # hosts that are contacted in parallel

logger = logging.getLogger(__name__)


class StaticHostsProvider(NodeProvider):  # type: ignore[misc]
    def __init__(self, provider_config: dict[str, Any], cluster_name: str, reach: Reach | None = None) -> None:
        super().__init__(provider_config, cluster_name)
        sys.excepthook = _in_a_sentence
        self._settings = read_provider(provider_config)
        self._reach = reach or reach_from_here(self._settings, cluster_name)
        self._store = self._reach.store
        self._starting: dict[str, LaunchRecord] = {}  # nodes whose start commands are running
        self._again: Thread | None = None  # stops Ray on hosts that did not answer when they were taken out of the file
        if self._reach.on_head:
            self._record_head_under_ray()

    def _record_head_under_ray(self) -> None:
        """In the autoscaler, the head must be a node even if the record is lost: Ray starts nothing before it has seen the head under the
        id with which it was started."""
        node_id, node_type = os.environ.get("RAY_CLOUD_INSTANCE_ID"), os.environ.get("RAY_NODE_TYPE_NAME")
        if not node_id or not node_type:
            return
        head = self._head_node(
            node_id,
            {
                TAG_RAY_NODE_KIND: NODE_KIND_HEAD,
                TAG_RAY_USER_NODE_TYPE: node_type,
                TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
            },
        )

        def with_head(record: ClusterRecord) -> ClusterRecord:
            if node_id in record.nodes:
                return record
            return with_node(without_nodes(record, record.matching({TAG_RAY_NODE_KIND: NODE_KIND_HEAD})), head)

        self._store.update(with_head)

    def _head_node(self, node_id: str, tags: Mapping[str, str]) -> LaunchRecord:
        return LaunchRecord(node_id, self._settings.head_ip, self._reach.head_address, pool="", tags=dict(tags))

    # --- what there is

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        """Ray's autoscaler asks every few seconds."""
        record = self._store.read()
        if record.unstopped and self._reach.on_head and not (self._again and self._again.is_alive()):
            self._again = Thread(target=self._stop_again, args=(record.unstopped.values(),), daemon=True)
            self._again.start()
        return record.matching(tag_filters)

    def _stop_again(self, nodes: Collection[LaunchRecord]) -> None:
        silent = self._stop(nodes, only_of=self._reach.head_address)  # by now another cluster may have the host
        self._store.update(lambda record: without_unstopped(record, [node for node in nodes if node not in silent]))

    def is_running(self, node_id: str) -> bool:
        return node_id in self._store.last_read().nodes

    def is_terminated(self, node_id: str) -> bool:
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> dict[str, str]:
        """Returns {} for a node that has just ended, which Ray then does not count as its own."""
        node = self._store.last_read().nodes.get(node_id)
        return dict(node.tags) if node is not None else {}

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        record = self._store.update(lambda record: with_tags(record, node_id, tags))
        if tags.get(TAG_RAY_NODE_STATUS) not in (STATUS_UP_TO_DATE, STATUS_UPDATE_FAILED):
            return
        started = self._starting.pop(node_id, None)
        if started is None or started.host in {node.host for node in record.nodes.values()}:
            return
        # The node was ended while its start commands ran, perhaps by another program. They went on after Ray had been stopped on the host,
        # and nothing else would stop what they started.
        self._end([started])

    def internal_ip(self, node_id: str) -> str:
        return self._node(node_id).address

    def external_ip(self, node_id: str) -> str:
        return self._address_from_here(self._node(node_id))

    def _address_from_here(self, node: LaunchRecord) -> str:
        return node.address if node.pool else self._reach.entrance

    def _node(self, node_id: str) -> LaunchRecord:
        node = self._store.last_read().nodes.get(node_id)
        if node is None:
            raise NodeLost(f"{node_id} is no longer a node of cluster {self.cluster_name}")
        return node

    # --- launching

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> dict[str, Any]:
        if tags[TAG_RAY_NODE_KIND] == NODE_KIND_HEAD:
            head = self._head_node(new_node_id(self._reach.head_address), tags)
            self._store.update(lambda record: with_node(record, head))
            return {head.node_id: {}}
        return self._launch_workers(tags, count)

    def _launch_workers(self, tags: Mapping[str, str], count: int) -> dict[str, Any]:
        pool = tags[TAG_RAY_USER_NODE_TYPE]
        nodes, silent = self._answering(self._store.read().free_hosts(pool), pool, tags)
        claimed: dict[str, Any] = {}

        def claim(record: ClusterRecord) -> ClusterRecord:
            claimed.clear()
            free = record.free_hosts(pool)
            for node in [node for node in nodes if node.host in free][:count]:
                record = with_node(record, node)
                claimed[node.node_id] = {}
            return record

        self._store.update(claim)
        self._starting.update((node.node_id, node) for node in nodes if node.node_id in claimed)
        if len(claimed) < count:
            why = "; ".join(silent) if silent else "every host of that type is in use"
            raise Unavailable(f"{pool}: {len(claimed)} of {count} nodes launched: {why}")
        return claimed

    def _answering(self, hosts: list[str], pool: str, tags: Mapping[str, str]) -> tuple[list[LaunchRecord], list[str]]:
        def probe(host: str) -> LaunchRecord | TandemError:
            try:
                address = resolve(host)
                self._reach.to_workers.run(address, "true", timeout_s=_PROBE_TIMEOUT_S)
            except TandemError as error:
                return error
            return LaunchRecord(new_node_id(address), host, address, pool, dict(tags))

        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="probe") as threads:
            answers = list(threads.map(probe, hosts))
        return (
            [answer for answer in answers if isinstance(answer, LaunchRecord)],
            [str(answer) for answer in answers if isinstance(answer, TandemError)],
        )

    # --- ending

    def terminate_node(self, node_id: str) -> None:
        self.terminate_nodes([node_id])

    def terminate_nodes(self, node_ids: list[str]) -> None:
        nodes = self._store.read().nodes
        self._end([nodes[node_id] for node_id in node_ids if node_id in nodes])

    def _end(self, nodes: Iterable[LaunchRecord]) -> list[LaunchRecord]:
        """Frees a host even if it does not answer: nothing is launched on it before it answers again, and then the start commands first
        stop what the old node left. Returns the nodes of the hosts that did not answer."""
        nodes = list(nodes)
        silent = self._stop(nodes)
        self._store.update(lambda record: without_nodes(record, [node.node_id for node in nodes]))
        return silent

    def _stop(self, nodes: Collection[LaunchRecord], only_of: str = "") -> list[LaunchRecord]:
        """Returns the nodes of the hosts that did not answer."""

        def stop(node: LaunchRecord) -> bool:
            shell = self._reach.to_workers if node.pool else self._reach.to_head
            script = stop_script(self._settings.stop_command, only_of)
            try:
                shell.run(self._address_from_here(node), script, timeout_s=_STOP_TIMEOUT_S)
            except Unavailable as error:
                logger.warning("Ray could not be stopped on %s: %s", node.host, error)
                return False
            except ScriptFailed as error:
                logger.warning("`%s` failed: %s", self._settings.stop_command, error)
            return True

        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="stop") as threads:
            return [node for node, answered in zip(nodes, threads.map(stop, nodes), strict=True) if not answered]

    def _drain(self, nodes: Collection[LaunchRecord]) -> None:
        """Lets the nodes' requests finish first, if there is a head on which the controller can be asked to drain them."""
        heads = self._store.last_read().matching({TAG_RAY_NODE_KIND: NODE_KIND_HEAD})
        if not nodes or not heads:
            return
        script = drain_script([node.address for node in nodes])
        try:
            said = self._reach.to_head.run(self._reach.entrance, script, timeout_s=_DRAIN_TIMEOUT_S)
            print(said.decode(errors="replace"), end="", flush=True)
        except (Unavailable, ScriptFailed) as error:
            print(f"the hosts could not be drained, so their requests continue on other nodes: {error}", flush=True)

    # --- `ray up`

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        sys.excepthook = _in_a_sentence  # Ray lets what is raised here end `ray up`
        return bootstrapped(cluster_config)

    def prepare_for_head_node(self, cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Ray calls this last before it copies the file to the head. It stops the hosts that are no longer listed: otherwise the autoscaler
        would find a node too many and stop one of its own choice."""
        hosts = {name: pool.hosts for name, pool in pools_of(cluster_config).items()}
        leaving = stranded_nodes(self._store.update(lambda record: with_hosts(record, hosts)))
        for node in leaving:
            print(f"{node.host} is no longer listed for {node.pool}: stopping Ray there", flush=True)
        self._drain(leaving)
        if silent := self._end(leaving):
            print(
                f"{', '.join(node.host for node in silent)} will be stopped when the head reaches it again", flush=True
            )
            self._store.update(lambda record: with_unstopped(record, silent))
        cluster_config["provider"]["ssh"] = msgspec.to_builtins(ssh_settings(cluster_config["auth"]))
        # Ray has copied them into worker_setup_commands by now, and would add them a second time.
        cluster_config["setup_commands"] = []
        return cluster_config


def _in_a_sentence(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, TandemError):
        print(f"tandem: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def stop_script(command: str, only_of: str = "") -> str:
    """`only_of`: stops only a node of the cluster whose head has this address."""
    # The brackets keep the pattern from being found in this script.
    condition = f"grep -sq 'gcs-addres[s]={only_of}:' /proc/[0-9]*/cmdline || exit 0; " if only_of else ""
    return _in_rays_shell(condition + command)


def drain_script(addresses: Iterable[str]) -> str:
    """Drains all addresses in parallel. An address without nodes does not keep the others from being drained."""
    drains = " & ".join(f"tandem drain {address} --timeout {_DRAIN_S:.0f}" for address in addresses)
    return _in_rays_shell(f"export RAY_AUTH_MODE=token; {drains} & wait")


def _in_rays_shell(command: str) -> str:
    """Runs the command in the shell in which Ray runs start commands, so that `ray` and `tandem` are found on the same path."""
    return f"bash --login -i -c {shlex.quote(f'source ~/.bashrc; {command}')} </dev/null"
