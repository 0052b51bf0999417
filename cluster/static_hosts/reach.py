"""How the hosts of a static cluster are reached, and where its record is: from the head itself, or from anywhere else."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from tandem.base.errors import ConfigurationError
from tandem.cluster.static_hosts.config import StaticProvider, ssh_settings_on_head
from tandem.cluster.static_hosts.shell import LocalShell, Shell, SshShell, ThroughHead
from tandem.cluster.static_hosts.store import LocalStore, RecordStore, RemoteStore


@dataclass(frozen=True, slots=True)
class Reach:
    head_address: str  # in the cluster's own network
    entrance: str  # the head's address from this machine
    on_head: bool
    to_head: Shell
    to_workers: Shell
    store: RecordStore


def reach_from_here(settings: StaticProvider, cluster_name: str) -> Reach:
    if settings.ssh is None:
        raise ConfigurationError(
            "provider.ssh is missing: this provider is made for `ray up`, which fills it in"
        )
    head_address = resolve(settings.head_ip)
    direct = SshShell(settings.ssh)
    if is_own_address(head_address):
        return Reach(head_address, head_address, True, LocalShell(), direct, LocalStore(cluster_name))
    entrance = settings.external_head_ip or head_address
    return Reach(
        head_address,
        entrance,
        on_head=False,
        to_head=direct,
        to_workers=ThroughHead(direct, entrance, ssh_settings_on_head(settings.ssh)),
        store=RemoteStore(cluster_name, direct, entrance),
    )


def resolve(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigurationError(f"{host} is neither an address nor a name that resolves: {error}") from error


def is_own_address(address: str) -> bool:
    """Tries to bind to the address, which only works on the machine that has it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
