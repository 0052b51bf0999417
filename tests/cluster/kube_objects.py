"""Kubernetes' objects in tests: read, rendered by kustomize, and held to their definitions, but stricter, because Kubernetes
drops what it does not know."""

from __future__ import annotations

import functools
import gzip
import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBERAY = ROOT / "manifests" / "kuberay"
BASE = KUBERAY / "base"
COMPONENTS = KUBERAY / "components"
SCHEMAS = ROOT / "tests" / "data" / "kuberay"
OF_OTHERS = {"RayCluster": "raycluster", "PodMonitor": "podmonitor", "InferencePool": "inferencepool"}

Document = dict[str, Any]

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl: `make test-platforms` has one")


def load(file: Path) -> Document:
    # Through JSON: what stands once in the file and is referred to is a value of its own in each place.
    document: Document = json.loads(json.dumps(yaml.safe_load(file.read_text(encoding="utf-8"))))
    return document


def strict(schema: Any) -> Any:
    """Kubernetes' dialect in jsonschema's, with every unknown field an error."""
    if isinstance(schema, list):
        return [strict(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if made.get("x-kubernetes-int-or-string") is True:
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if isinstance(made.get("properties"), dict) and "x-kubernetes-preserve-unknown-fields" not in made:
        made.setdefault("additionalProperties", False)
    return made


@functools.cache
def validator_of(kind: str) -> jsonschema.Draft202012Validator:
    """Of `RayCluster` and the others that operators define, and of Kubernetes' own kinds."""
    if kind not in OF_OTHERS:
        schema = json.loads(gzip.decompress((SCHEMAS / "core-v1.37.schema.json.gz").read_bytes()))
        return jsonschema.Draft202012Validator({**schema, "$ref": f"#/$defs/{kind.lower()}"})
    schema = strict(json.loads(gzip.decompress((SCHEMAS / f"{OF_OTHERS[kind]}-v1.schema.json.gz").read_bytes())))
    schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes checks this part by itself
    return jsonschema.Draft202012Validator(schema)


def mistakes(document: Document) -> list[str]:
    errors = validator_of(document["kind"]).iter_errors(document)
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in errors]


def kustomized(folder: Path) -> list[Document]:
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return [*yaml.safe_load_all(done.stdout)]


def with_components(folder: Path, base: Path, *names: str) -> list[Document]:
    """As an operator's own overlay in `folder` has them."""
    customization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(base, folder)],
        "components": [os.path.relpath(COMPONENTS / name, folder) for name in names],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(customization))
    return kustomized(folder)


def by_kind(documents: Iterable[Document]) -> dict[str, Document]:
    return {document["kind"]: document for document in documents}


def groups_of(raycluster: Document) -> list[Document]:
    return [raycluster["spec"]["headGroupSpec"], *raycluster["spec"]["workerGroupSpecs"]]


def containers(raycluster: Document) -> list[Document]:
    return [container for group in groups_of(raycluster) for container in group["template"]["spec"]["containers"]]


def environment_of(container: Document) -> dict[str, Any]:
    names = [entry["name"] for entry in container["env"]]
    assert len(names) == len(set(names))
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}
