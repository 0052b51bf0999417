"""Builds the part of an operator's `ray up` file that describes existing machines."""

from __future__ import annotations

from typing import Any


def cluster_file(*decode_hosts: str) -> dict[str, Any]:
    return {
        "cluster_name": "tandem",
        "max_workers": 1000,
        "provider": {
            "type": "external",
            "module": "tandem.cluster.static_hosts.provider.StaticHostsProvider",
            "head_ip": "10.0.0.10",
        },
        "auth": {"ssh_user": "ubuntu", "ssh_private_key": "~/key"},
        "head_node_type": "head",
        "available_node_types": {
            "head": {"node_config": {}, "resources": {}},
            "prefill": {"node_config": {"hosts": ["10.0.0.11"]}, "resources": {"prefill": 1}},
            "decode": {"node_config": {"hosts": list(decode_hosts)}, "resources": {"decode": 1}},
        },
    }
