"""What operators write about static hosts, checked, and the settings of Ray that follow from it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.cluster.static_hosts.shell import SshSettings

KEY_ON_HEAD = "~/ray_bootstrap_key.pem"  # where `ray up` copies the operator's key on the head


class StaticProvider(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file's `provider` section, with what Ray and `bootstrapped` add to it."""

    type: str
    module: str
    head_ip: str
    external_head_ip: str | None = None  # the head's address from outside, if it differs from head_ip
    stop_command: str = "ray stop"
    ssh: SshSettings | None = None  # filled in from `auth`; operators do not write it
    use_internal_ips: bool = False
    disable_node_updaters: bool = False
    disable_launch_config_check: bool = True
    config_cache_path: str | None = msgspec.field(default=None, name="_config_cache_path")


class PoolHosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker type's `node_config`."""

    hosts: tuple[str, ...]
    standby: int = 0  # how many hosts are started only when the load asks for them


def read_provider(section: Mapping[str, Any]) -> StaticProvider:
    provider: StaticProvider = _convert(section, StaticProvider, "provider")
    return provider


def pools_of(config: Mapping[str, Any]) -> dict[str, PoolHosts]:
    """Returns the hosts of each node type. Raises ConfigurationError if they make no valid cluster."""
    head_ip = read_provider(config["provider"]).head_ip
    pools: dict[str, PoolHosts] = {}
    claimed: dict[str, str] = {head_ip: "the head (provider.head_ip)"}
    for name, node_type in config["available_node_types"].items():
        where = f"available_node_types.{name}"
        node_config = node_type.get("node_config") or {}
        if name == config["head_node_type"]:
            if node_config:
                raise ConfigurationError(f"{where}.node_config must be {{}}: the head's host is provider.head_ip")
            continue
        pool = _convert(node_config, PoolHosts, f"{where}.node_config")
        if not 0 <= pool.standby <= len(pool.hosts):
            raise ConfigurationError(
                f"{where}.node_config.standby must be from 0 to the number of hosts ({len(pool.hosts)}), not {pool.standby}"
            )
        for host in pool.hosts:
            if host in claimed:
                raise ConfigurationError(
                    f"{where}.node_config.hosts lists {host}, which is already {claimed[host]}: a host is one Ray "
                    "node; to have more on it, give its type more resources"
                )
            claimed[host] = f"one of {where}"
        pools[name] = pool
    return pools


def bootstrapped(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the file's content with the numbers of nodes that follow from the hosts, and with what the provider needs to reach them.

    A pool starts all its hosts except those on standby. `min_workers` and `max_workers` may change that within the number of hosts.
    """
    filled: dict[str, Any] = copy.deepcopy(dict(config))
    pools = pools_of(filled)
    for name, pool in pools.items():
        node_type = filled["available_node_types"][name]
        most = min(len(pool.hosts), node_type.get("max_workers", len(pool.hosts)))
        least = node_type.get("min_workers") or min(most, len(pool.hosts) - pool.standby)
        if least > most:
            raise ConfigurationError(
                f"available_node_types.{name}.min_workers is {least}, but the pool can have {most}: "
                "list more hosts, or raise max_workers"
            )
        node_type["min_workers"], node_type["max_workers"] = least, most
    filled["max_workers"] = sum(filled["available_node_types"][name]["max_workers"] for name in pools)
    ssh = ssh_settings(filled["auth"])
    if ssh.private_key is not None and not Path(ssh.private_key).expanduser().is_file():
        raise ConfigurationError(
            f"auth.ssh_private_key {ssh.private_key} is not there: name the file of the key that the hosts admit"
        )
    filled["provider"]["ssh"] = msgspec.to_builtins(ssh)
    return filled


def ssh_settings(auth: Mapping[str, Any]) -> SshSettings:
    if not auth.get("ssh_user"):
        raise ConfigurationError("auth.ssh_user must be set to the user as which Ray runs on every host")
    return SshSettings(auth["ssh_user"], auth.get("ssh_private_key"), auth.get("ssh_proxy_command"))


def ssh_settings_on_head(settings: SshSettings) -> SshSettings:
    """Returns the settings for the head: the same user, the key where `ray up` copies it, and no proxy from outside."""
    return SshSettings(settings.user, KEY_ON_HEAD if settings.private_key else None)


def _convert(section: Mapping[str, Any], kind: type[Any], where: str) -> Any:
    try:
        return msgspec.convert(dict(section), kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{where}: {error}") from error
