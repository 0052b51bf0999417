"""manifests/kuberay: against the definition that Kubernetes uses, but stricter, because Kubernetes drops what it does
not know; through Ray's own reading of it; and what neither of them checks."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cluster.cli import make_parser
from tandem.cluster.config import TandemConfig
from tandem.cluster.launcher import Host, Offer
from tandem.cluster.models.store import models_folder
from tandem.cluster.on_ray.runtime import import_ray
from tandem.cluster.pools.placement import place
from tandem.cluster.pools.room import lacking, needs_of, places
from tandem.cluster.pools.state import NodeRecord
from tandem.cluster.settings.combined import resolve
from tandem.cluster.settings.layers import read_environment, read_file
from tandem.router.config import RouterPlacement
from tandem.wire.nodes import Role
from tests.cluster.kube_objects import (
    BASE,
    COMPONENTS,
    KUBERAY,
    ROOT,
    Document,
    by_kind,
    containers,
    environment_of,
    groups_of,
    kustomized,
    load,
    mistakes,
    needs_kubectl,
    with_components,
)
from tests.documents import blocks
from tests.doors import passes

import_ray()  # Ray reads its environment when it is first imported
from ray import __version__ as ray_version  # noqa: E402
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr  # noqa: E402

CUSTOMIZATIONS = sorted(KUBERAY.glob("*/*/kustomization.yaml"))


@pytest.fixture
def raycluster() -> Document:
    return load(BASE / "raycluster.yaml")


# --- the RayCluster


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (("spec", "authOptions"), "mode", "tokens"),
        (("spec", "workerGroupSpecs", 0), "replicas", "2"),
        (("spec", "headGroupSpec", "template", "spec", "containers", 0), "readynessProbe", {}),
    ],
)
def test_the_check_finds_a_misspelt_field_and_a_wrong_type(
    raycluster: Document, where: tuple[str | int, ...], name: str, value: object
) -> None:
    section: Any = raycluster
    for step in where:
        section = section[step]
    section[name] = value
    assert len(mistakes(raycluster)) == 1


def test_rays_autoscaler_reads_the_pools_out_of_it(raycluster: Document) -> None:
    raycluster["metadata"]["namespace"] = "default"
    types = _derive_autoscaling_config_from_ray_cr(raycluster)["available_node_types"]
    assert set(types) == {"headgroup", "prefill", "decode", "encode"}
    for pool, least in (("prefill", 1), ("decode", 1), ("encode", 0)):
        resources = types[pool]["resources"]
        assert (resources["CPU"], resources[pool]) == (0, 1)
        assert types[pool]["labels"] == {"tandem-role": pool}
        assert (types[pool]["min_workers"], types[pool]["max_workers"]) == (least, 8)


def test_ray_is_guarded_and_no_container_has_rights_that_it_does_not_need(raycluster: Document) -> None:
    spec = raycluster["spec"]
    assert spec["rayVersion"] == ray_version
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["autoscalerOptions"]["version"] == "v2"
    assert spec["headGroupSpec"]["rayStartParams"]["dashboard-host"] == "127.0.0.1"
    assert "0.0.0.0" not in (BASE / "raycluster.yaml").read_text(encoding="utf-8")
    for container in containers(raycluster):
        context = container["securityContext"]
        rights = (context["runAsNonRoot"], context["allowPrivilegeEscalation"], context["capabilities"])
        assert rights == (True, False, {"drop": ["ALL"]})
        # Every pod waits for a head that is away for ten minutes. Ray itself would wait for one.
        assert int(environment_of(container)["RAY_gcs_rpc_server_reconnect_timeout_s"]) >= 600


# --- the head


def head_container(raycluster: Document) -> Document:
    container: Document = raycluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    return container


def test_the_head_is_ready_when_the_router_answers_and_is_found_before(raycluster: Document) -> None:
    container = head_container(raycluster)
    (port,) = [port for port in container["ports"] if port["name"] == "http"]
    assert raycluster["spec"]["headGroupSpec"]["headService"]["spec"]["publishNotReadyAddresses"] is True
    service = load(BASE / "service.yaml")
    assert service["spec"]["ports"] == [{"name": "http", "port": port["containerPort"], "targetPort": "http"}]
    assert service["spec"]["selector"] == {"ray.io/cluster": raycluster["metadata"]["name"]}
    for one in containers(raycluster):  # a router in each, and clients reach those that answer
        assert port in one["ports"]
        assert one["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    config = resolve([read_file(BASE / "tandem.yaml")]).config
    assert config.router.placement is RouterPlacement.EVERY_HOST


def with_commands(folder: Path, **scripts: str) -> dict[str, str]:
    """The environment of a container that finds these programs on its PATH."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    start = """ray start --head --resources='{"router": 1}'"""
    return {"PATH": f"{folder}:/usr/bin:/bin", "POD_IP": "127.0.0.1", "KUBERAY_GEN_RAY_START_CMD": start}


QUIET: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


@pytest.mark.parametrize(
    ("ray", "tandem", "end"),
    [
        ("trap 'kill %1; exit 7' TERM; echo >{up}; sleep 60 & wait", "exit 3", 7),
        ("exit 4", "exec sleep 60", 4),
        ("sleep 0.1; exit 5", "exit 0", 5),
    ],
    ids=["tandem cannot serve", "ray ends before", "ray ends later"],
)
def test_the_head_container_ends_with_ray_or_when_tandem_cannot_serve(
    raycluster: Document, tmp_path: Path, ray: str, tandem: str, end: int
) -> None:
    """Run as it stands, with a Ray and a Tandem of our own on the PATH. A Ray that handles SIGTERM is healthy once it does."""
    container = head_container(raycluster)
    up = tmp_path / "up"
    if "{up}" not in ray:
        up.touch()
    script = f'if [ "$1" = health-check ]; then exec test -e {up}; fi; {ray.format(up=up)}'
    environment = with_commands(tmp_path, ray=script, tandem=tandem)
    command = ["setsid", "--wait", *container["command"], *container["args"]]
    done = subprocess.run(command, env=environment, timeout=30, check=False, **QUIET)
    assert done.returncode == end


def test_the_head_goes_on_when_tandem_serves_and_ends_ray_when_it_is_told_to_stop(
    raycluster: Document, tmp_path: Path
) -> None:
    container = head_container(raycluster)
    told, up, started = (tmp_path / name for name in ("told", "up", "started"))
    os.mkfifo(started)
    ray = f"""if [ "$1" = health-check ]; then exec test -e {up}; fi
trap 'touch {told}; exit 0' TERM; echo >{up}; sleep 60 & wait"""
    environment = with_commands(tmp_path, ray=ray, tandem=f"""echo "$@" >{started}""")
    command = [*container["command"], *container["args"]]
    head = subprocess.Popen(command, env=environment, start_new_session=True, **QUIET)
    try:
        served = subprocess.run(["cat", started], timeout=20, check=True, capture_output=True, text=True)
        assert "serve --address auto --detach" in served.stdout
        with pytest.raises(subprocess.TimeoutExpired):
            head.wait(timeout=0.2)
        head.terminate()
        head.wait(timeout=20)
        assert told.exists()
    finally:
        subprocess.run(["pkill", "-KILL", "--session", str(head.pid)], check=False)


def test_commands_in_the_heads_pod_know_where_its_router_listens(raycluster: Document) -> None:
    """`tandem apply` compares all settings; one that it did not know would go back to its default."""
    names = [entry["name"] for entry in head_container(raycluster)["env"]]
    assert names.index("POD_IP") < names.index("TANDEM_ROUTER__HOST"), "Kubernetes fills in what it knows already"
    told = environment_of(head_container(raycluster))["TANDEM_ROUTER__HOST"].replace("$(POD_IP)", "10.0.0.7")
    layers = [read_file(BASE / "tandem.yaml"), read_environment({"TANDEM_ROUTER__HOST": told})]
    assert resolve(layers).config.router.host == "10.0.0.7"


# --- a pod that goes


def test_every_pod_is_evacuated_within_its_grace(raycluster: Document, tmp_path: Path) -> None:
    """The hook runs as it stands, with a Tandem of ours on the PATH; its arguments are ones that the command takes."""
    said = tmp_path / "said"
    environment = {**with_commands(tmp_path, tandem=f'echo "$@" >{said}; exit 1'), "POD_IP": "10.0.0.7"}
    grace = {group["template"]["spec"]["terminationGracePeriodSeconds"] for group in groups_of(raycluster)}
    for container in containers(raycluster):
        assert "POD_IP" in {entry["name"] for entry in container["env"]}
        hook = container["lifecycle"]["preStop"]["exec"]["command"]
        done = subprocess.run(hook, env=environment, timeout=20, check=False)
        assert done.returncode == 0, "a controller that is away keeps no pod"
        options = make_parser().parse_args(said.read_text().split())
        assert said.read_text().startswith("evacuate ")
        assert options.machine == "10.0.0.7"
        assert options.timeout + 15 < min(grace)


def test_a_disruption_leaves_a_pod_of_each_pool(raycluster: Document) -> None:
    budgets = [*yaml.safe_load_all((BASE / "disruption.yaml").read_text(encoding="utf-8"))]
    groups = {group["groupName"]: group for group in raycluster["spec"]["workerGroupSpecs"]}
    del groups["encode"]  # without its pods, images are encoded on those of the others
    for budget, group in zip(budgets, groups.values(), strict=True):
        assert budget["spec"]["selector"]["matchLabels"] == {
            "ray.io/cluster": raycluster["metadata"]["name"],
            "ray.io/group": group["groupName"],
        }
        assert budget["spec"]["minAvailable"] < group["replicas"]
        assert "maxUnavailable" not in budget["spec"], "Kubernetes takes it for its own controllers' pods alone"


# --- what is beside it


def test_everybody_else_reaches_the_api_and_nothing_more(raycluster: Document) -> None:
    ours = {"matchLabels": {"ray.io/cluster": raycluster["metadata"]["name"]}}
    spec = load(BASE / "networkpolicy.yaml")["spec"]
    assert spec["podSelector"] == ours
    assert spec["ingress"] == [{"from": [{"podSelector": ours}]}, {"ports": [{"port": 8000, "protocol": "TCP"}]}]


def test_the_image_has_this_version_and_this_ray() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    dockerfile = (KUBERAY / "Dockerfile").read_text(encoding="utf-8")
    assert f"COPY dist/tandem_serve-{version}-py3-none-any.whl" in dockerfile
    assert f"ARG BASE=rayproject/ray:{ray_version}-" in dockerfile
    for folder in (BASE, COMPONENTS / "daily-sizes"):
        assert load(folder / "kustomization.yaml")["images"] == [{"name": "tandem-serve", "newTag": version}]


def test_the_images_build_steps_are_ones_that_a_shell_and_the_package_know() -> None:
    """No image is built here: each step's shell is parsed, and what it names of ours is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (KUBERAY / "Dockerfile").read_text(encoding="utf-8")
    steps = [line.removeprefix("RUN ") for line in text.splitlines() if line.startswith("RUN ")]
    assert steps
    for step in steps:
        subprocess.run(["bash", "-n", "-c", step], check=True)
    torch = next(line for line in project["dependencies"] if line.startswith("torch=="))
    assert any(f'--index-url "${{TORCH_INDEX}}" {torch};' in step for step in steps)
    assert set(re.findall(r"EXTRAS=\[(\w+)\]", text)) <= set(project["optional-dependencies"])
    for module in re.findall(r"python -m (tandem[\w.]+)", text):
        assert (ROOT / module.removeprefix("tandem.").replace(".", "/")).with_suffix(".py").is_file()


# --- kustomize


def patched(document: Document, patch: str) -> Document:
    """JSON Patch, as far as the overlays use it."""
    document = copy.deepcopy(document)
    for operation in yaml.safe_load(patch):
        *steps, last = [
            int(step) if step.isdigit() else step.replace("~1", "/") for step in operation["path"].split("/")[1:]
        ]
        section: Any = document
        for step in steps:
            section = section[step]
        if operation["op"] == "replace":
            section[last]  # what is not there cannot be replaced
        else:
            assert operation["op"] == "add"
            if last == "-":
                section.append(operation["value"])
                continue
            assert last not in section
        section[last] = operation["value"]
    return document


@pytest.mark.parametrize("file", CUSTOMIZATIONS, ids=lambda file: file.parent.name)
def test_a_customized_raycluster_is_still_one(raycluster: Document, file: Path) -> None:
    for patch in load(file).get("patches", []):
        assert patch["target"] == {"kind": raycluster["kind"], "name": raycluster["metadata"]["name"]}
        raycluster = patched(raycluster, patch["patch"])
    assert mistakes(raycluster) == []


KINDS = {"ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "RayCluster", "Service"}


@needs_kubectl
@pytest.mark.parametrize(
    "folder",
    [BASE, *(KUBERAY / "overlays" / name for name in ("gpu", "machine", "spread", "wide"))],
    ids=lambda folder: folder.name,
)
def test_kustomize_renders_it(folder: Path) -> None:
    documents = kustomized(folder)
    assert [mistake for document in documents for mistake in mistakes(document)] == []
    rendered = by_kind(documents)
    assert set(rendered) == KINDS
    raycluster = rendered["RayCluster"]
    (image,) = {container["image"] for container in containers(raycluster)}
    assert ":" in image
    (volume,) = raycluster["spec"]["headGroupSpec"]["template"]["spec"]["volumes"]
    assert volume["configMap"]["name"] == rendered["ConfigMap"]["metadata"]["name"]


def of_overlay(name: str, raycluster: Document) -> tuple[dict[str, Document], TandemConfig]:
    """The groups of pods as Ray's own autoscaler reads them, and the configuration beside them."""
    folder = KUBERAY / "overlays" / name
    for patch in load(folder / "kustomization.yaml")["patches"]:
        raycluster = patched(raycluster, patch["patch"])
    raycluster["metadata"]["namespace"] = "default"
    types = _derive_autoscaling_config_from_ray_cr(raycluster)["available_node_types"]
    return types, resolve([read_file(folder / "tandem.yaml")]).config


def places_in(group: Document, config: TandemConfig) -> dict[Role, int]:
    offer = Offer({name: float(amount) for name, amount in group["resources"].items()}, group.get("labels", {}))
    return places(offer, needs_of(config))


def test_pods_of_a_wide_node_offer_what_its_pool_asks_for(raycluster: Document) -> None:
    """In Ray's own reading: a GPU for each rank, and the labels that the pool's nodes must have."""
    types, config = of_overlay("wide", raycluster)
    pool = config.pools.aggregated
    group = types["aggregated"]
    assert group["resources"]["GPU"] == pool.ranks == pool.resources["GPU"] == 4
    assert places_in(group, config)[Role.AGGREGATED] == 1
    assert (group["min_workers"], group["max_workers"]) == (pool.min, pool.max)
    assert [types[name]["min_workers"] for name in ("decode", "encode")] == [0, 0]


def test_a_pod_that_is_a_machine_holds_nodes_of_both_pools(raycluster: Document) -> None:
    """Every node gets a GPU and cores of its own, on any of the machines."""
    types, config = of_overlay("machine", raycluster)
    group = types["machine"]
    slots = {role: places_in(group, config)[role] for role in (Role.PREFILL, Role.DECODE)}
    assert slots == {Role.PREFILL: 2, Role.DECODE: 6}
    assert group["resources"]["GPU"] == sum(slots.values()) == 8
    assert [types[name]["min_workers"] for name in ("decode", "encode")] == [0, 0]
    machines = [Host(name, name, tuple(range(64)), gpus=8, slots=slots) for name in ("a", "b")]
    assert group["min_workers"] == group["max_workers"] == len(machines)
    nodes: list[NodeRecord] = []
    for role in slots:
        for number in range(config.pools.of(role).first_size):
            placement = place(config, machines, nodes, role)
            assert placement is not None
            nodes.append(NodeRecord(f"{role.value}-{number}", role, placement))
    placements = [node.placement for node in nodes if node.placement is not None]
    assert len({(each.host, each.device) for each in placements}) == len(nodes) == 16
    assert {len(each.cores) for each in placements} == {8}
    budget = load(KUBERAY / "overlays" / "machine" / "disruption.yaml")["spec"]
    assert budget["selector"]["matchLabels"]["ray.io/group"] == "machine"
    assert budget["minAvailable"] < group["min_workers"]


def test_pods_of_a_spread_node_come_together_and_give_it_equal_parts(raycluster: Document) -> None:
    types, config = of_overlay("spread", raycluster)
    for role in (Role.PREFILL, Role.DECODE):
        pool, group = config.pools.of(role), types[role.value]
        assert group["resources"]["GPU"] == pool.ranks_per_machine == 4
        assert places_in(group, config)[role] == 1
        assert group["max_workers"] == (pool.max or 0) * pool.machines, "pods, of which so many are one node"
    machines = [Offer({"CPU": 0.0, "GPU": 4.0, "prefill": 1.0}), Offer({"GPU": 4.0, "decode": 1.0})]
    asked = "pools.prefill wants 2 nodes on 2 machines each, but the cluster's machines have no room for any"
    assert lacking(config, machines)[0].startswith(asked)
    (lack,) = lacking(config, machines * 3)
    assert "have room for 1: waiting" in lack, "a machine that is left over is none"


# --- components


@needs_kubectl
def test_all_components_go_together_and_with_gpus(tmp_path: Path) -> None:
    names = ["daily-sizes", "gateway", "hub-token", "model-volume", "podmonitor", "rdma"]
    assert {*names, "persistent-head"} == {folder.name for folder in COMPONENTS.iterdir()}
    documents = with_components(tmp_path, KUBERAY / "overlays" / "gpu", *names)
    assert [mistake for document in documents for mistake in mistakes(document)] == []
    rendered = by_kind(documents)
    assert set(rendered) == KINDS | {"CronJob", "Deployment", "InferencePool", "PersistentVolumeClaim", "PodMonitor"}
    raycluster = rendered["RayCluster"]
    for container in containers(raycluster):
        assert {"HF_TOKEN", "HF_HOME", "TANDEM_CACHE", "POD_IP"} <= environment_of(container).keys()
    _, *nodes = containers(raycluster)
    device = {"rdma/hca_shared_devices_a": "1"}
    for container, memory, more in zip(nodes, ("64Gi", "64Gi", "16Gi"), (device, device, {}), strict=True):
        for side in ("requests", "limits"):
            wanted = {"cpu": "8", "memory": memory, "nvidia.com/gpu": "1", **more}
            assert container["resources"][side] == wanted


@needs_kubectl
def test_models_of_all_pods_are_on_one_volume_that_they_may_write(tmp_path: Path) -> None:
    rendered = by_kind(with_components(tmp_path, BASE, "model-volume", "hub-token"))
    claim, raycluster = rendered["PersistentVolumeClaim"], rendered["RayCluster"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for group in groups_of(raycluster):
        pod = group["template"]["spec"]
        (volume,) = [each for each in pod["volumes"] if each["name"] == "models"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        (container,) = pod["containers"]
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "models"]
        environment = environment_of(container)
        for name in ("TANDEM_CACHE", "HF_HOME"):
            assert Path(environment[name]).is_relative_to(mount["mountPath"])
        assert models_folder(environment).is_relative_to(mount["mountPath"])
        assert pod["securityContext"]["fsGroup"] == container["securityContext"]["runAsUser"]
        secret = environment["HF_TOKEN"]["secretKeyRef"]
        assert secret == {"name": "tandem-hub", "key": "token", "optional": False}, "it must be there"


@needs_kubectl
def test_rdma_adds_one_right_and_a_device_to_nodes_that_hand_over(tmp_path: Path) -> None:
    """Locking memory is the right: a device reads and writes it without the kernel, so it must stay where it is."""
    made = by_kind(with_components(tmp_path, BASE, "rdma"))
    head, *nodes, encode = containers(made["RayCluster"])
    for container in (head, encode):
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not any(name.startswith("rdma/") for name in container["resources"]["limits"])
    for container in nodes:
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        device = {name: n for name, n in container["resources"]["limits"].items() if name.startswith("rdma/")}
        assert device == {"rdma/hca_shared_devices_a": "1"}
        (told,) = container["envFrom"]
        assert told["configMapRef"]["name"] == "tandem-ucx"
        assert device.items() <= container["resources"]["requests"].items()


def test_the_picker_is_found_and_finds_every_router(raycluster: Document) -> None:
    folder = COMPONENTS / "gateway"
    pool, picker, service, routers = (
        load(folder / f"{name}.yaml") for name in ("inferencepool", "picker", "picker-service", "routers")
    )
    assert [mistake for each in (pool, picker, service, routers) for mistake in mistakes(each)] == []
    pods = {"ray.io/cluster": raycluster["metadata"]["name"]}
    assert pool["spec"]["selector"]["matchLabels"] == routers["spec"]["selector"] == pods
    (port,) = pool["spec"]["targetPorts"]
    (container,) = picker["spec"]["template"]["spec"]["containers"]
    options = make_parser().parse_args(container["command"][1:])
    assert options.routers == f"{routers['metadata']['name']}:{port['number']}"
    assert options.port == container["ports"][0]["containerPort"] == pool["spec"]["endpointPickerRef"]["port"]["number"]
    assert pool["spec"]["endpointPickerRef"]["name"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == picker["spec"]["template"]["metadata"]["labels"]
    (block,) = (each for each in blocks("yaml") if "InferencePool" in each.text)
    (backend,) = yaml.safe_load(block.text)["backendRefs"]
    passes("block", block.name)
    assert backend == {
        "group": pool["apiVersion"].partition("/")[0],
        "kind": pool["kind"],
        "name": pool["metadata"]["name"],
    }


def test_the_podmonitor_is_one_and_finds_every_router(raycluster: Document) -> None:
    monitor = load(COMPONENTS / "podmonitor" / "podmonitor.yaml")
    assert mistakes(monitor) == []
    cluster = raycluster["metadata"]["name"]
    assert monitor["spec"]["selector"]["matchLabels"] == {"ray.io/cluster": cluster}
    assert monitor["spec"]["jobLabel"] == "ray.io/cluster"
    assert cluster == "tandem", "what the alerts call the job"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for container in containers(raycluster):
        assert endpoint["port"] in {port["name"] for port in container["ports"]}
    broken = copy.deepcopy(monitor)
    broken["spec"]["podMetricsEndpoint"] = broken["spec"].pop("podMetricsEndpoints")
    assert mistakes(broken)


@pytest.mark.parametrize("when", ["day", "night"])
def test_sizes_by_the_clock_are_ones_that_the_command_takes_and_pods_can_have(raycluster: Document, when: str) -> None:
    job = load(COMPONENTS / "daily-sizes" / f"{when}.yaml")
    assert mistakes(job) == []
    (container,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    options = make_parser().parse_args(container["command"][1:])
    service = load(BASE / "service.yaml")
    (port,) = service["spec"]["ports"]
    assert options.url == f"http://{service['metadata']['name']}:{port['port']}"
    assert "TANDEM_API_KEY" in environment_of(container)
    groups = {group["groupName"]: group for group in raycluster["spec"]["workerGroupSpecs"]}
    for pool, nodes in (size.split("=") for size in container["command"][4:]):
        assert groups[pool]["minReplicas"] <= int(nodes) <= groups[pool]["maxReplicas"]
