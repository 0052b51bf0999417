"""These tests simulate machines with network namespaces. They need root and minutes, and only one run at a time: `make test-hosts`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for the helper modules lab and static_cluster

from lab import Lab
from static_cluster import StaticCluster
from tools import lab_or_skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab_or_skip()
    with Lab(tmp_path_factory.mktemp("hosts"), hosts=6) as lab:
        yield lab


@pytest.fixture(scope="module")
def cluster(lab: Lab) -> StaticCluster:
    """A head, two prefill hosts and two decode hosts; and one more host, which is not in the cluster file."""
    cluster = StaticCluster(lab)
    _, prefill_1, prefill_2, decode_1, decode_2, _ = lab.hosts
    cluster.up(prefill=[prefill_1, prefill_2], decode=[decode_1, decode_2])
    return cluster
