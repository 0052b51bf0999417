"""The faults that a cluster of the lab must stand. Each has a beginning, a length and an end; what it is done to are the first
prefill host and the first decode host, so that a healthy host of each kind is left."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import links
from fault_cluster import FaultCluster
from lab import Host
from links import RESET_S, Network, Way

Act = Callable[[FaultCluster], None]
PARTITIONS_S = (1.0, 5.0, 30.0, 120.0)
REFUSED_S = 5.0
TRICKLE_S = 10.0
TRICKLE = "1mbit"


def _heal_all(cluster: FaultCluster) -> None:
    for host in cluster.hosts:
        links.heal(host)


@dataclass(frozen=True)
class Fault:
    name: str
    seconds: float
    begin: Act
    end: Act = _heal_all
    has_healthy_way: bool = True  # while it lasts, requests could be served without a pause
    ends_connections: bool = False  # clients' connections end with it, and they have to ask again
    crowd: int = 0  # requests that come besides, all at once
    leaving: bool = False  # those of the crowd whose clients go away in the middle
    rate: str | None = None  # of all links, where the fault needs one


def _partitions() -> Iterator[Fault]:
    def decode_mute(network: Network) -> Act:
        return lambda cluster: links.cut(cluster.decode[0], Way.SENT, network)

    def kv_cut(cluster: FaultCluster) -> None:
        links.cut(cluster.prefill[0], Way.SENT, Network.DATA, cluster.decode)

    def requests_cut(cluster: FaultCluster) -> None:
        links.cut(cluster.decode[0], Way.RECEIVED, Network.DATA, [cluster.router])

    def head_mute(cluster: FaultCluster) -> None:
        links.cut(cluster.router, Way.SENT, Network.CONTROL)

    for seconds in PARTITIONS_S:
        length = f"{seconds:.0f} s"
        yield Fault(f"data: a decode host is not heard, {length}", seconds, decode_mute(Network.DATA))
        yield Fault(f"data: prefill to decode is cut, {length}", seconds, kv_cut)
        yield Fault(f"data: router to decode is cut, {length}", seconds, requests_cut)
        yield Fault(f"control: a decode host is not heard, {length}", seconds, decode_mute(Network.CONTROL))
        yield Fault(f"control: the head is not heard, {length}", seconds, head_mute)


def _refusals() -> Iterator[Fault]:
    def tokens(cluster: FaultCluster) -> None:
        links.refuse(cluster.router, Network.DATA, [cluster.decode[0]])

    def kv(cluster: FaultCluster) -> None:
        links.refuse(cluster.decode[0], Network.DATA, cluster.prefill)

    def requests(cluster: FaultCluster) -> None:
        links.refuse(cluster.decode[0], Network.DATA, [cluster.router])

    def prompts(cluster: FaultCluster) -> None:
        links.refuse(cluster.prefill[0], Network.DATA, [cluster.router])

    def control(cluster: FaultCluster) -> None:
        links.refuse(cluster.router, Network.CONTROL)

    yield Fault("reset: tokens of a decode host", RESET_S, tokens)
    yield Fault("reset: KV to a decode host", RESET_S, kv)
    yield Fault("reset: requests to a decode host", RESET_S, requests)
    yield Fault("reset: control network at the head", RESET_S, control)
    yield Fault("refused: KV to a decode host", REFUSED_S, kv)
    yield Fault("refused: requests to a decode host", REFUSED_S, requests)
    yield Fault("refused: requests to a prefill host", REFUSED_S, prompts)


def _trickles() -> Iterator[Fault]:
    def of(choose: Callable[[FaultCluster], Host]) -> tuple[Act, Act]:
        return (lambda cluster: links.limit(choose(cluster), TRICKLE), lambda cluster: cluster.limit_links())

    begin, end = of(lambda cluster: cluster.prefill[0])
    yield Fault("slow: a prefill host's link drops to 1 Mbit", TRICKLE_S, begin, end)
    begin, end = of(lambda cluster: cluster.decode[0])
    yield Fault("slow: a decode host's link drops to 1 Mbit", TRICKLE_S, begin, end)


def _host_of(cluster: FaultCluster, kind: str) -> Host:
    return {"prefill": cluster.prefill[0], "decode": cluster.decode[0]}.get(kind, cluster.router)


def _signals() -> Iterator[Fault]:
    def sent(kind: str, number: signal.Signals) -> Act:
        return lambda cluster: cluster.send(_host_of(cluster, kind), kind, number)

    def nothing(cluster: FaultCluster) -> None:
        pass

    for kind, lengths in (
        ("decode", (1, 10, 60)),
        ("prefill", (1, 10, 60)),
        ("router", (1, 8)),
        ("controller", (8, 60)),
    ):
        for seconds in lengths:
            yield Fault(
                f"stopped: {kind}, {seconds} s", seconds, sent(kind, signal.SIGSTOP), sent(kind, signal.SIGCONT),
                has_healthy_way=kind != "router",
            )  # fmt: skip
    for kind in ("decode", "prefill", "controller", "router"):
        is_router = kind == "router"
        yield Fault(
            f"killed: {kind}", 1.0, sent(kind, signal.SIGKILL), nothing,
            has_healthy_way=not is_router, ends_connections=is_router,
        )  # fmt: skip


def _crowds() -> Iterator[Fault]:
    def nothing(cluster: FaultCluster) -> None:
        pass

    yield Fault("crowd: full pools", 1.0, nothing, nothing, crowd=24)
    yield Fault(
        "crowd: clients leave during slow moves", 3.0, nothing, nothing, crowd=12, leaving=True, rate="100mbit"
    )  # fmt: skip


def all_faults() -> list[Fault]:
    unplugged = Fault(
        "unplugged: a decode host", 5.0,
        lambda cluster: cluster.decode[0].cut_off(), lambda cluster: cluster.decode[0].heal(),
    )  # fmt: skip
    found = [*_refusals(), *_trickles(), *_signals(), *_crowds(), unplugged, *_partitions()]
    # Short ones first: a run that is cut short has seen most of the table.
    return sorted(found, key=lambda fault: fault.seconds)
