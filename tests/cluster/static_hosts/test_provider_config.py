from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.base.errors import ConfigurationError
from tandem.cluster.static_hosts.config import (
    KEY_ON_HEAD,
    PoolHosts,
    bootstrapped,
    pools_of,
    ssh_settings,
    ssh_settings_on_head,
)
from tandem.cluster.static_hosts.shell import SshSettings
from tests.cluster.static_hosts.cluster_file import cluster_file

CONFIG = cluster_file("10.0.0.21", "10.0.0.22", "10.0.0.23")


@pytest.fixture
def config() -> dict[str, Any]:
    return copy.deepcopy(CONFIG)


def workers(config: dict[str, Any], pool: str) -> tuple[int, int]:
    node_type = bootstrapped(config)["available_node_types"][pool]
    return node_type["min_workers"], node_type["max_workers"]


def test_every_listed_host_is_started_and_numbers_in_the_file_hold_within_what_there_is(config: dict[str, Any]) -> None:
    assert (workers(config, "decode"), workers(config, "prefill")) == ((3, 3), (1, 1))
    made = bootstrapped(config)
    assert made["max_workers"] == 4
    assert made["provider"]["ssh"] == {"user": "ubuntu", "private_key": "~/key", "proxy_command": None}
    assert config == CONFIG, "the operator's file is left alone"
    decode = config["available_node_types"]["decode"]
    decode |= {"min_workers": 1, "max_workers": 2}
    assert workers(config, "decode") == (1, 2)
    decode |= {"min_workers": 0, "max_workers": 1000}
    assert workers(config, "decode") == (3, 3)


def test_hosts_on_standby_wait_for_the_load(config: dict[str, Any]) -> None:
    config["available_node_types"]["decode"]["node_config"]["standby"] = 2
    assert workers(config, "decode") == (1, 3)


def test_the_head_uses_the_key_where_ray_up_puts_it_and_no_way_in_from_outside() -> None:
    outside = ssh_settings({"ssh_user": "ubuntu", "ssh_private_key": "~/key", "ssh_proxy_command": "nc %h %p"})
    assert ssh_settings_on_head(outside) == SshSettings("ubuntu", KEY_ON_HEAD, None)
    assert ssh_settings_on_head(SshSettings("ubuntu")) == SshSettings("ubuntu", None, None)


def test_the_head_is_in_no_pool(config: dict[str, Any]) -> None:
    assert pools_of(config) == {
        "prefill": PoolHosts(hosts=("10.0.0.11",)),
        "decode": PoolHosts(hosts=("10.0.0.21", "10.0.0.22", "10.0.0.23")),
    }


@pytest.mark.parametrize(
    ("where", "value", "sentence"),
    [
        (("provider", "head_ip"), None, "provider: .*head_ip"),
        (("provider", "hed_ip"), "10.0.0.10", "provider: .*hed_ip"),
        (("auth", "ssh_user"), "", "auth.ssh_user must be set to the user"),
        (("auth", "ssh_private_key"), "~/other", "auth.ssh_private_key ~/other is not there"),
        (("available_node_types", "head", "node_config"), {"hosts": ["10.0.0.10"]}, "the head's host is provider.head_ip"),
        (("available_node_types", "decode", "node_config"), {}, r"decode\.node_config: .*hosts"),
        (("available_node_types", "decode", "node_config"), {"host": ["10.0.0.21"]}, r"decode\.node_config: .*host"),
        (("available_node_types", "decode", "node_config", "hosts"), "10.0.0.21", r"decode\.node_config: Expected `array`"),
        (("available_node_types", "decode", "node_config", "hosts"), ["10.0.0.11"], "10.0.0.11, which is already one of .*prefill"),
        (("available_node_types", "decode", "node_config", "hosts"), ["10.0.0.10"], "10.0.0.10, which is already the head"),
        (("available_node_types", "decode", "node_config", "hosts"), ["d", "d"], "d, which is already one of .*decode"),
        (("available_node_types", "decode", "node_config", "standby"), 4, r"standby must be from 0 to .*\(3\), not 4"),
        (("available_node_types", "decode", "min_workers"), 4, "min_workers is 4, but the pool can have 3"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else None,
)  # fmt: skip
def test_what_cannot_become_a_cluster_is_refused_in_a_sentence(
    config: dict[str, Any], where: tuple[str, ...], value: object, sentence: str
) -> None:
    section = config
    for name in where[:-1]:
        section = section[name]
    section[where[-1]] = value
    with pytest.raises(ConfigurationError, match=sentence):
        bootstrapped(config)


@pytest.mark.slow
def test_ray_up_says_a_mistake_in_a_sentence(tmp_path: Path) -> None:
    """Slow: runs `ray up`, which shows a trace of Ray's calls for whatever a provider raises."""
    config = yaml.safe_load(
        (Path(__file__).parents[3] / "manifests" / "ray" / "static.yaml").read_text(encoding="utf-8")
    )
    config |= {"auth": {"ssh_user": ""}, "file_mounts": {}}
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    words = [sys.executable, "-m", "ray.scripts.scripts", "up", "-y", str(file)]
    child = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 1
    assert child.stderr.splitlines()[-1].startswith("tandem: auth.ssh_user must be set to the user")
    assert "Traceback" not in child.stderr
