from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ConfigurationError
from tandem.cluster.saving import as_json
from tandem.cluster.static_hosts.record import (
    ClusterRecord,
    LaunchRecord,
    decode,
    new_node_id,
    stranded_nodes,
    with_hosts,
    with_node,
    with_tags,
    without_nodes,
)

HOSTS = {"prefill": ("p1", "p2"), "decode": ("d1", "d2", "d3")}


def node(host: str, pool: str, **tags: str) -> LaunchRecord:
    return LaunchRecord(new_node_id(host), host, host, pool, tags)


def test_an_id_is_fresh_and_tells_the_address() -> None:
    ids = {new_node_id("10.0.0.21") for _ in range(100)}
    assert len(ids) == 100
    assert {node_id.rpartition("-")[0] for node_id in ids} == {"10.0.0.21"}


def test_a_host_in_use_is_not_free() -> None:
    record = with_hosts(ClusterRecord(), HOSTS)
    assert record.free_hosts("decode") == ["d1", "d2", "d3"]
    record = with_node(record, node("d2", "decode"))
    assert record.free_hosts("decode") == ["d1", "d3"]
    assert record.free_hosts("prefill") == ["p1", "p2"]
    assert record.free_hosts("unknown") == []


def test_nodes_are_found_by_all_of_the_tags() -> None:
    first, second = node("d1", "decode", kind="worker", status="ok"), node("d2", "decode", kind="worker")
    record = with_node(with_node(ClusterRecord(), first), second)
    assert record.matching({}) == [first.node_id, second.node_id]
    assert record.matching({"kind": "worker", "status": "ok"}) == [first.node_id]
    assert record.matching({"kind": "head"}) == []


def test_a_host_that_is_listed_no_more_or_elsewhere_strands_its_node_and_never_the_head() -> None:
    head, kept, dropped, moved = (node("h", ""), node("d1", "decode"), node("d2", "decode"), node("p1", "prefill"))
    record = ClusterRecord(nodes={n.node_id: n for n in (head, kept, dropped, moved)})
    record = with_hosts(record, {"decode": ("d1", "p1")})
    assert stranded_nodes(record) == [dropped, moved]


def test_what_is_no_record_is_refused_by_name() -> None:
    assert with_tags(ClusterRecord(), "gone-1", {"status": "ok"}) == ClusterRecord(), "tags of a node that has ended"
    assert decode(b"", "file") == ClusterRecord()
    with pytest.raises(ConfigurationError, match=r"^file is not a cluster record"):
        decode(b"{", "file")


@given(st.lists(st.tuples(st.sampled_from(["launch", "end", "tag"]), st.integers(0, 4)), max_size=40))
def test_however_nodes_come_and_go_a_host_has_one_and_an_id_never_returns(steps: list[tuple[str, int]]) -> None:
    record = with_hosts(ClusterRecord(), HOSTS)
    seen: set[str] = set()
    for step, choice in steps:
        running = list(record.nodes)
        if step == "launch":
            pool = ("prefill", "decode")[choice % 2]
            for host in record.free_hosts(pool)[:1]:
                fresh = node(host, pool)
                assert fresh.node_id not in seen
                seen.add(fresh.node_id)
                record = with_node(record, fresh)
        elif running and step == "end":
            record = without_nodes(record, [running[choice % len(running)]])
        elif running:
            record = with_tags(record, running[choice % len(running)], {"status": str(choice)})
        hosts = [n.host for n in record.nodes.values()]
        assert len(hosts) == len(set(hosts))
        assert decode(as_json(record), "file") == record
