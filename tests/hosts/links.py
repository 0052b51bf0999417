"""Faults of the links between a lab's hosts: nftables drops or refuses packets, and tc limits rates. There are no delays and no random
loss, because not every kernel has netem.

Two networks share the wires, told apart by ports: `CONTROL` is Ray's own traffic, whose ports `fault_cluster` fixes; `DATA`
is everything else between the hosts: requests, tokens, KV and its side channel. A cut is one way: what the host sends, or
what it receives.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from lab import Host, in_netns, on_bridge

# Every port that Ray listens on in `fault_cluster`.
GCS_PORT = 6379
CONTROL_PORTS = (20000, 20999)
_CONTROL_SET = f"{{ {GCS_PORT}, {CONTROL_PORTS[0]}-{CONTROL_PORTS[1]} }}"
_TABLE = "tandem_lab"
RESET_S = 0.3


class Network(enum.StrEnum):
    DATA = "data"
    CONTROL = "control"


class Way(enum.StrEnum):
    """Which of a host's packets a fault affects."""

    SENT = "output"
    RECEIVED = "input"


def cut(host: Host, way: Way, network: Network, peers: Sequence[Host] = ()) -> None:
    """Drops packets silently. `peers`: only those to or from these hosts."""
    _add_rules(host, way, network, peers, "drop")


def refuse(host: Host, network: Network, peers: Sequence[Host] = ()) -> None:
    """Answers incoming packets with RST, like a firewall, or like a host that has forgotten its connections."""
    _add_rules(host, Way.RECEIVED, network, peers, "reject with tcp reset")


def heal(host: Host) -> None:
    """Removes all cuts and refusals of the host, but not its rate limit. Idempotent."""
    in_netns(host, "nft", f"add table inet {_TABLE}; delete table inet {_TABLE}")


def limit(host: Host, rate: str) -> None:
    """Limits the host's link in both directions, to a rate such as 100mbit. Replaces the previous limit."""
    shape = ("root", "tbf", "rate", rate, "burst", "1mb", "latency", "200ms")
    in_netns(host, "tc", "qdisc", "replace", "dev", "eth0", *shape)
    on_bridge("tc", "qdisc", "replace", "dev", host.port, *shape)


def dropped_packets(host: Host) -> int:
    """How many packets this host's rules have matched since they were made; 0 without rules."""
    said = in_netns(host, "nft", f"list table inet {_TABLE}", check=False)
    words = said.split()
    return sum(int(words[at + 1]) for at, word in enumerate(words[:-1]) if word == "packets")


def _add_rules(host: Host, way: Way, network: Network, peers: Sequence[Host], verdict: str) -> None:
    side = "daddr" if way is Way.SENT else "saddr"
    chosen = f"ip {side} {{ {', '.join(peer.address for peer in peers)} }} " if peers else ""
    own = 'oifname "eth0"' if way is Way.SENT else 'iifname "eth0"'
    if network is Network.CONTROL:
        ports = [f"tcp dport {_CONTROL_SET}", f"tcp sport {_CONTROL_SET}"]
    else:
        ports = [f"tcp dport != {_CONTROL_SET} tcp sport != {_CONTROL_SET}"]
    chain = f"inet {_TABLE} {way}"
    lines = [
        f"add table inet {_TABLE}",
        f"add chain {chain} {{ type filter hook {way} priority 0; }}",
        *(f"add rule {chain} {own} {chosen}{port} counter {verdict}" for port in ports),
    ]
    in_netns(host, "nft", "\n".join(lines))
