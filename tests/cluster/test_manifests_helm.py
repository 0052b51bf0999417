"""manifests/helm: its chart makes what kustomize makes, object by object, in Helm's own rendering."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tandem.cluster.cli import make_parser
from tandem.cluster.config import TandemConfig
from tandem.cluster.settings.combined import resolve
from tandem.cluster.settings.layers import read_file
from tests.cluster.kube_objects import (
    BASE,
    KUBERAY,
    ROOT,
    Document,
    by_kind,
    containers,
    groups_of,
    kustomized,
    load,
    mistakes,
    needs_kubectl,
    with_components,
)
from tests.small_server import Answer, SmallServer

HELM = ROOT / "manifests" / "helm"
CHART = HELM / "tandem"
VALUES = sorted(HELM.glob("*.yaml"))

needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="no helm: `make test-platforms` has one")

EVERYTHING: Document = {
    "secrets": {"keys": "tandem-keys", "tls": "tandem-tls", "hubToken": "tandem-hub"},
    "persistentHead": {"enabled": True},
    "modelVolume": {"enabled": True, "storageClassName": "shared"},
    "rdma": {"enabled": True},
    "podMonitor": {"enabled": True, "labels": {"release": "monitoring"}, "endpoint": {"scheme": "https"}},
    "gateway": {"enabled": True},
    "service": {"type": "LoadBalancer"},
    "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "pod": {"priorityClassName": "serving"},
    "head": {"pod": {"nodeSelector": {"pool": "cpu"}}},
    "groups": {"decode": {"pod": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}}},
    "schedules": {"day": {"schedule": "45 7 * * 1-5", "timeZone": "Europe/Berlin", "pools": {"decode": 6}}},
    "operatorKey": "tandem-operator",
}


def helm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["helm", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def template(
    *files: Path,
    chart: Path = CHART,
    name: str = "tandem",
    sets: Mapping[str, object] = {},
    kubernetes: Path | None = None,
) -> list[Document]:
    flags = [word for file in files for word in ("--values", file)]
    flags += [word for key, value in sets.items() for word in ("--set-json", f"{key}={json.dumps(value)}")]
    if kubernetes is not None:
        flags += ["--dry-run=server", "--disable-openapi-validation", "--kubeconfig", kubernetes]
    done = helm("template", name, chart, *flags)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document is not None]


# What Helm asks of a Kubernetes before it makes the objects of a release.
SERVED = {
    "v1": {"configmaps": "ConfigMap", "services": "Service"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "ray.io/v1": {"rayclusters": "RayCluster"},
}


def answers_of_kubernetes(raycluster: Document) -> dict[str, object]:
    groups = [
        {"name": group, "versions": [{"groupVersion": f"{group}/v1", "version": "v1"}]}
        for group in (version.removesuffix("/v1") for version in SERVED if version != "v1")
    ]
    answers: dict[str, object] = {
        "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
        "/apis/ray.io/v1/namespaces/default/rayclusters/tandem": raycluster,
    }
    for version, kinds in SERVED.items():
        resources = [
            {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get"]}
            for name, kind in kinds.items()
        ]
        of_version = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        answers[f"/{'api' if version == 'v1' else 'apis'}/{version}"] = of_version
    return answers


@contextmanager
def kubernetes_with(raycluster: Document, folder: Path) -> Iterator[Path]:
    """As much of Kubernetes' API as Helm reads, over HTTP, where one RayCluster is. Yields the file that leads Helm there."""
    answers = answers_of_kubernetes(raycluster)
    unknown = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}

    def answer(path: str) -> Answer:
        found = answers.get(path.partition("?")[0])
        status = 404 if found is None else 200
        return status, {"Content-Type": "application/json"}, json.dumps(found or unknown).encode()

    with SmallServer(answer) as server:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "it", "cluster": {"server": server.url}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": ""}}],
            "current-context": "it",
        }
        (folder / "kubeconfig").write_text(yaml.safe_dump(config))
        yield folder / "kubeconfig"


def config_of(documents: list[Document], folder: Path) -> TandemConfig:
    (text,) = (each["data"]["tandem.yaml"] for each in documents if "tandem.yaml" in each.get("data", {}))
    (folder / "tandem.yaml").write_text(text)
    return resolve([read_file(folder / "tandem.yaml")]).config


def comparable(documents: list[Document], folder: Path) -> dict[tuple[str, str], Document]:
    """By kind and name, with the settings as Tandem reads them, and without groups that have no pod at first."""
    config = config_of(documents, folder)
    found = {(each["kind"], each["metadata"]["name"]): copy.deepcopy(each) for each in documents}
    (cluster,) = (each for each in found.values() if each["kind"] == "RayCluster")
    name, spec = cluster["metadata"]["name"], cluster["spec"]
    # A kustomize overlay can leave a group of the base without pods, and cannot take it away.
    spec["workerGroupSpecs"] = [each for each in spec["workerGroupSpecs"] if each["replicas"] > 0]
    for (kind, budget), each in [*found.items()]:
        group = each["spec"]["selector"]["matchLabels"]["ray.io/group"] if kind == "PodDisruptionBudget" else None
        if group is not None and group not in {every["groupName"] for every in spec["workerGroupSpecs"]}:
            del found[kind, budget]
    found["ConfigMap", f"{name}-config"]["data"] = {"tandem.yaml": config}
    return found


# --- without Helm


def test_the_chart_is_this_versions() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    chart = load(CHART / "Chart.yaml")
    assert chart["appVersion"] == version
    assert chart["version"] == version.replace(".dev", "-dev.")


def test_what_the_chart_is_made_of_are_kustomizes_own_files() -> None:
    for file in (CHART / "files").iterdir():
        assert file.is_symlink()
        assert file.resolve().is_relative_to(KUBERAY)


def test_values_that_are_not_set_are_the_bases() -> None:
    values = load(CHART / "values.yaml")
    assert values["settings"] == load(BASE / "tandem.yaml")
    groups = {group["groupName"]: group for group in load(BASE / "raycluster.yaml")["spec"]["workerGroupSpecs"]}
    assert values["groups"].keys() == groups.keys()
    for name, group in groups.items():
        (container,) = group["template"]["spec"]["containers"]
        assert values["groups"][name]["resources"] == container["resources"]["limits"]
    for file in (CHART / "values.yaml", *VALUES):
        jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text())).validate(load(file))


# --- as Helm renders it


@needs_helm
@needs_kubectl
def test_the_defaults_make_what_kustomize_makes(tmp_path: Path) -> None:
    ours = comparable(template(), tmp_path)
    assert ours == comparable(kustomized(BASE), tmp_path)
    (cluster,) = (each for each in template() if each["kind"] == "RayCluster")
    assert cluster == by_kind(kustomized(BASE))["RayCluster"]
    assert {kind for kind, _ in ours} == {
        "ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "RayCluster", "Service",
    }  # fmt: skip


@needs_helm
@needs_kubectl
@pytest.mark.parametrize("file", VALUES, ids=lambda file: file.stem)
def test_each_file_of_values_makes_what_the_overlay_of_its_name_makes(file: Path, tmp_path: Path) -> None:
    ours = comparable(template(file), tmp_path)
    assert ours == comparable(kustomized(KUBERAY / "overlays" / file.stem), tmp_path)
    assert {folder.name for folder in (KUBERAY / "overlays").iterdir()} == {each.stem for each in VALUES}


@needs_helm
@needs_kubectl
def test_values_make_what_components_make(tmp_path: Path) -> None:
    sizes = {
        "day": {"schedule": "45 7 * * 1-5", "pools": {"prefill": 4, "decode": 8}},
        "night": {"schedule": "0 19 * * 1-5", "pools": {"prefill": 1, "decode": 2}},
    }
    asked = {
        "secrets.hubToken": "tandem-hub",
        "modelVolume.enabled": True,
        "podMonitor.enabled": True,
        "gateway.enabled": True,
        "rdma.enabled": True,
        "persistentHead.enabled": True,
        "schedules": sizes,
        "operatorKey": "tandem-operator",
    }
    names = [folder.name for folder in sorted((KUBERAY / "components").iterdir())]
    theirs = comparable(with_components(tmp_path, BASE, *names), tmp_path)
    ours = comparable(template(sets=asked), tmp_path)
    for found in (ours, theirs):
        for when in sizes:  # the order of the pools means nothing
            job = found["CronJob", f"tandem-{when}"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
            job["containers"][0]["command"].sort()
    assert ours == theirs


@needs_helm
def test_all_values_together_make_objects_by_their_definitions(tmp_path: Path) -> None:
    documents = template(HELM / "gpu.yaml", name="chat", sets=EVERYTHING)
    assert [mistake for document in documents for mistake in mistakes(document)] == []
    rendered = by_kind(documents)
    assert set(rendered) == {
        "ConfigMap", "CronJob", "Deployment", "InferencePool", "NetworkPolicy", "PersistentVolumeClaim", "PodDisruptionBudget",
        "PodMonitor", "RayCluster", "Service",
    }  # fmt: skip
    services = {each["metadata"]["name"]: each["spec"] for each in documents if each["kind"] == "Service"}
    assert services["chat"]["type"] == "LoadBalancer"
    assert rendered["PersistentVolumeClaim"]["spec"]["storageClassName"] == "shared"
    assert rendered["PodMonitor"]["metadata"]["labels"]["release"] == "monitoring"
    head, *groups = [group["template"]["spec"] for group in groups_of(rendered["RayCluster"])]
    assert head["nodeSelector"] == {"pool": "cpu"}
    assert [bool(pod.get("tolerations")) for pod in groups] == [False, True, False]
    for pod in (head, *groups):
        assert pod["priorityClassName"] == "serving"
        assert pod["containers"][0]["env"][-1]["name"] == "HTTPS_PROXY"
    config = config_of(documents, tmp_path)
    for container in containers(rendered["RayCluster"]):
        mounts = [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
        for file in (config.router.api_keys_file, config.router.tls_certificate, config.router.tls_key):
            assert Path(str(file)).parent in mounts
        assert container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    (job,) = rendered["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert make_parser().parse_args(job["command"][1:]).url == "https://chat:8000"
    (picker,) = rendered["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert make_parser().parse_args(picker["command"][1:]).routers == "https://chat-routers:8000"
    assert services["chat-routers"]["selector"] == rendered["InferencePool"]["spec"]["selector"]["matchLabels"]
    assert rendered["InferencePool"]["spec"]["endpointPickerRef"]["name"] in services
    assert job["image"] == picker["image"] == head["containers"][0]["image"]


def texts(part: object) -> list[str]:
    if isinstance(part, dict):
        return [text for each in part.values() for text in texts(each)]
    if isinstance(part, list):
        return [text for each in part for text in texts(each)]
    return [part] if isinstance(part, str) else []


@needs_helm
def test_two_releases_share_no_object_and_no_pod() -> None:
    """What is still called after the other are names that mean something else."""
    one, other = (template(name=name, sets={**EVERYTHING, "secrets": {}}) for name in ("chat", "code"))
    for mine, theirs in zip(one, other, strict=True):
        changed = {text.replace("chat", "code") for text in texts(mine)}
        assert changed == set(texts(theirs))
        assert mine["metadata"]["name"] != theirs["metadata"]["name"]
    told = {text for document in one for text in texts(document) if "tandem" in text.lower() and len(text) < 60}
    assert {text for text in told if not text.startswith(("tandem ", "tandem-serve:", "/", "TANDEM_"))} == {
        "tandem", "tandem-operator",
    }  # fmt: skip


@needs_helm
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"grops": {}}, "grops"),
        ({"groups.decode.replicas": "2"}, "groups.decode.replicas"),
        ({"settings.pools.decode.nodes": None}, "groups.decode.replicas is needed"),
        ({"schedules.day": {"schedule": "0 8 * * *", "pools": {"decode": 2}}}, "operatorKey"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_a_wrong_value_is_refused_by_its_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        template(sets=values)


@needs_helm
def test_a_number_stays_the_number_that_it_was(tmp_path: Path) -> None:
    asked = {"settings.scheduler.max_num_batched_tokens": 12_345_678, "settings.slo.inter_token_s": 0.0005}
    config = config_of(template(sets=asked), tmp_path)
    assert (config.scheduler.max_num_batched_tokens, config.slo.inter_token_s) == (12_345_678, 0.0005)


@needs_helm
def test_a_pool_that_follows_its_pods_has_them_counted_in_its_group() -> None:
    asked = {"settings.pools.decode.nodes": None, "groups.decode.replicas": 3}
    cluster = by_kind(template(sets=asked))["RayCluster"]
    (group,) = [each for each in cluster["spec"]["workerGroupSpecs"] if each["groupName"] == "decode"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (3, 1, 8)


def replicas_of(documents: list[Document]) -> dict[str, int]:
    return {
        group["groupName"]: group["replicas"] for group in by_kind(documents)["RayCluster"]["spec"]["workerGroupSpecs"]
    }


@needs_helm
@pytest.mark.parametrize(("prefill", "encode"), [(5, 1), (0, 0)])
def test_an_upgrade_leaves_each_group_the_pods_that_the_autoscaler_gave_it(
    prefill: int, encode: int, tmp_path: Path
) -> None:
    """Within the limits that the values say now."""
    there = by_kind(template())["RayCluster"]
    assert replicas_of([there]) == {"prefill": 2, "decode": 2, "encode": 0}
    for group, replicas in zip(there["spec"]["workerGroupSpecs"], (prefill, 8, encode), strict=True):
        group["replicas"] = replicas
    there["metadata"] |= {
        "namespace": "default",
        "labels": {**there["metadata"]["labels"], "app.kubernetes.io/managed-by": "Helm"},
        "annotations": {"meta.helm.sh/release-name": "tandem", "meta.helm.sh/release-namespace": "default"},
    }
    with kubernetes_with(there, tmp_path) as kubernetes:
        made = template(kubernetes=kubernetes, sets={"settings.pools.decode.max": 6, "groups.prefill.minReplicas": 0})
    assert replicas_of(made) == {"prefill": prefill, "decode": 6, "encode": encode}


@needs_helm
def test_the_package_needs_nothing_beside_it(tmp_path: Path) -> None:
    assert helm("lint", "--strict", CHART).returncode == 0
    made = helm("package", CHART, "--destination", tmp_path)
    assert made.returncode == 0, made.stderr
    (package,) = tmp_path.glob("*.tgz")
    assert template(chart=package) == template()
