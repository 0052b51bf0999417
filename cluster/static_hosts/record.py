"""Which hosts a static cluster has, and which Ray node each of them is now. Pure: a record in, a record out.

Each cluster has one record, on the head's host (`store`). The autoscaler on the head and `ray down` on a laptop both read and change it, so
they cannot disagree about what runs where.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

import msgspec

from tandem.base.errors import ConfigurationError


class LaunchRecord(msgspec.Struct, frozen=True):
    """One launch. A host that is launched again is a new node, because Ray never forgets an id that has ended."""

    node_id: str
    host: str  # as the operator's file names it
    address: str
    pool: str  # its node type; "" for the head
    tags: dict[str, str]


class ClusterRecord(msgspec.Struct, frozen=True):
    hosts: dict[str, tuple[str, ...]] = {}  # by node type, as of the last `ray up`
    nodes: dict[str, LaunchRecord] = {}  # by node id, in launch order
    # By host, which the operator's file no longer lists: the node that was on it. It did not answer, so Ray may still run there
    unstopped: dict[str, LaunchRecord] = {}

    def matching(self, tags: Mapping[str, str]) -> list[str]:
        return [
            node.node_id
            for node in self.nodes.values()
            if all(node.tags.get(name) == value for name, value in tags.items())
        ]

    def free_hosts(self, pool: str) -> list[str]:
        taken = {node.host for node in self.nodes.values()}
        return [host for host in self.hosts.get(pool, ()) if host not in taken]


def new_node_id(address: str) -> str:
    """Returns ADDRESS-RANDOM. Start commands take the address from the part before the last dash."""
    return f"{address}-{secrets.token_hex(4)}"


def with_node(record: ClusterRecord, node: LaunchRecord) -> ClusterRecord:
    return msgspec.structs.replace(record, nodes=record.nodes | {node.node_id: node})


def without_nodes(record: ClusterRecord, node_ids: Iterable[str]) -> ClusterRecord:
    gone = set(node_ids)
    kept = {node_id: node for node_id, node in record.nodes.items() if node_id not in gone}
    return msgspec.structs.replace(record, nodes=kept)


def with_tags(record: ClusterRecord, node_id: str, tags: Mapping[str, str]) -> ClusterRecord:
    """Returns the record unchanged if the node has ended."""
    node = record.nodes.get(node_id)
    if node is None:
        return record
    return with_node(record, msgspec.structs.replace(node, tags=node.tags | dict(tags)))


def with_hosts(record: ClusterRecord, hosts: Mapping[str, tuple[str, ...]]) -> ClusterRecord:
    """A host that is listed again is not stopped: its start commands do that first."""
    listed = {host for of_pool in hosts.values() for host in of_pool}
    unstopped = {host: node for host, node in record.unstopped.items() if host not in listed}
    return msgspec.structs.replace(record, hosts=dict(hosts), unstopped=unstopped)


def with_unstopped(record: ClusterRecord, nodes: Iterable[LaunchRecord]) -> ClusterRecord:
    return msgspec.structs.replace(record, unstopped=record.unstopped | {node.host: node for node in nodes})


def without_unstopped(record: ClusterRecord, nodes: Iterable[LaunchRecord]) -> ClusterRecord:
    stopped = {node.node_id for node in nodes}
    kept = {host: node for host, node in record.unstopped.items() if node.node_id not in stopped}
    return msgspec.structs.replace(record, unstopped=kept)


def stranded_nodes(record: ClusterRecord) -> list[LaunchRecord]:
    """Returns the nodes on hosts that the operator's file no longer lists for their pool."""
    return [node for node in record.nodes.values() if node.pool and node.host not in record.hosts.get(node.pool, ())]


def decode(content: bytes, where: str) -> ClusterRecord:
    if not content.strip():
        return ClusterRecord()
    try:
        return msgspec.json.decode(content, type=ClusterRecord)
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            f"{where} is not a cluster record ({error}): run `ray stop` on the cluster's hosts and delete the file"
        ) from error
