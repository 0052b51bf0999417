"""manifests/ray: Ray's own checks, offline, and what Ray does not check."""

from __future__ import annotations

import copy
import os
import re
import socket
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.base.wings import find_wing
from tandem.cluster.on_ray.runtime import import_ray
from tandem.cluster.settings.combined import resolve
from tandem.cluster.settings.layers import read_file

import_ray()  # Ray reads its environment when it is first imported
from ray.autoscaler._private.util import prepare_config, validate_config  # noqa: E402
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "manifests" / "ray").glob("*.yaml"))
STATIC_HOSTS = find_wing("tandem.cluster.static_hosts.config")
CLUSTERS = [file for file in FILES if not file.name.startswith("tandem") and (STATIC_HOSTS or file.stem != "static")]

cluster_files = pytest.mark.parametrize("file", CLUSTERS, ids=lambda file: file.stem)


def load(file: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return config


def commands(config: dict[str, Any]) -> list[str]:
    return [command for key, value in config.items() if key.endswith("_commands") for command in value]


def test_there_is_a_file_for_each_kind_of_machine() -> None:
    assert {file.stem for file in FILES} >= {"aws", "gcp", "static"}


@cluster_files
def test_ray_accepts_the_file(file: Path, tmp_path: Path) -> None:
    prepared: Any = prepare_config(load(file))
    if "ssh_private_key" in prepared["auth"]:
        key = tmp_path / "key"
        key.touch()
        prepared["auth"]["ssh_private_key"] = str(key)
    validate_config(prepared)
    if prepared["provider"]["type"] == "external":
        prepared = STATIC_HOSTS.bootstrapped(prepared)
        validate_config(prepared)
    types = AutoscalingConfig(prepared, skip_content_hash=True).get_node_type_configs()
    assert set(types) == {"head", "prefill", "decode", "encode"}
    for pool in ("prefill", "decode", "encode"):
        assert types[pool].resources == {"CPU": 0, pool: 1}
        assert types[pool].labels == {"tandem-role": pool}
        assert types[pool].min_worker_nodes <= types[pool].max_worker_nodes
        # No machine encodes images before one is asked for.
        assert (types[pool].min_worker_nodes == 0) == (pool == "encode")
    assert types["head"].max_worker_nodes == 1


@cluster_files
def test_every_command_is_one_that_bash_can_read(file: Path) -> None:
    config = load(file)
    for command in commands(config):
        checked = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr
    # Nothing that the file leaves out is filled in by Ray's defaults.
    prepared = prepare_config(copy.deepcopy(config))
    assert set(prepared["available_node_types"]) == set(config["available_node_types"])
    for key in (key for key in prepared if key.endswith("_commands")):
        assert key in config


@cluster_files
def test_ray_is_started_with_its_token_and_on_named_addresses(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert "0.0.0.0" not in text
    config = load(file)
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    started = [command for command in commands(config) if "ray start" in command]
    assert len(started) == 2
    for command in started:
        before, _, arguments = command.partition("ray start ")
        assert "RAY_AUTH_MODE=token" in before
        assert "chmod 600 ~/.ray/auth_token" in before
        assert "--node-ip-address=" in arguments
    head = next(command for command in started if "--head" in command)
    assert "--dashboard-host=127.0.0.1" in head


@cluster_files
def test_ray_up_copies_what_is_there_and_is_over_when_tandem_serves(file: Path) -> None:
    config = load(file)
    last = config["head_start_ray_commands"][-1]
    assert "tandem serve --address auto --detach" in last
    assert "RAY_AUTH_MODE=token" in last
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wheel = f"{project['name'].replace('-', '_')}-{project['version']}-py3-none-any.whl"
    assert config["file_mounts"][f"~/{wheel}"] == f"dist/{wheel}"
    assert set(re.findall(r"\S*\.whl", " ".join(commands(config)))) == {f"~/{wheel}"}
    for local in config["file_mounts"].values():
        assert local.startswith(("~/.ray/", "dist/")) or (ROOT / local).is_file(), local


def test_the_settings_of_a_node_on_several_machines_divide_its_ranks_among_them() -> None:
    spread = resolve([read_file(ROOT / "manifests" / "ray" / "tandem-spread.yaml")]).config.pools.prefill
    assert (spread.machines, spread.ranks_per_machine) == (2, 2)


@cluster_files
def test_what_serves_outlives_a_head_that_is_away_and_a_machine_that_is_cut_off(file: Path) -> None:
    """For ten minutes the first, for two the second. Ray itself would wait a minute, and not at all."""
    config = load(file)
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        (start,) = [command for command in config[key] if "ray start" in command]
        settings = dict(re.findall(r"(RAY_\w+)=(\S+?);?(?=\s)", start))
        assert int(settings["RAY_gcs_rpc_server_reconnect_timeout_s"]) >= 600
        if key.startswith("head"):
            assert settings["RAY_gcs_storage"] == "rocksdb"
            assert settings["RAY_gcs_storage_path"].startswith("$HOME/")
            names = ("period_ms", "timeout_ms", "failure_threshold")
            period, timeout, failures = (int(settings[f"RAY_health_check_{name}"]) for name in names)
            assert (period + timeout) * failures >= 120_000


@cluster_files
@pytest.mark.parametrize(("running", "starts"), [("raylet", False), ("gcs_server", True)])
def test_a_head_of_which_only_the_control_store_is_left_is_started_again(
    file: Path, running: str, starts: bool, tmp_path: Path
) -> None:
    """A raylet ends by itself, for example where the machine was too busy at its start. The control store then answers as before."""
    (command,) = [command for command in load(file)["head_start_ray_commands"] if "ray start" in command]
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "comm").write_text(f"{running}\n")
    ray = tmp_path / "ray"
    ray.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/asked\n')
    ray.chmod(0o700)
    with socket.create_server(("127.0.0.1", 0)) as control_store:
        for here, there in (
            ("/proc/", f"{tmp_path}/"),
            ("/6379", f"/{control_store.getsockname()[1]}"),
            ("$(hostname -I | cut -d ' ' -f 1)", "127.0.0.1"),
        ):
            command = command.replace(here, there)
        environment = {
            "HOME": str(tmp_path),
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "RAY_CLOUD_INSTANCE_ID": "127.0.0.1-1",
        }
        subprocess.run(["bash", "-c", command], env=environment, check=True, timeout=60)
    asked = (tmp_path / "asked").read_text().split()
    assert asked == (["stop", "start"] if starts else ["health-check"])
