"""Another model and another version of Tandem on five hosts that serve, while clients stream. `make test-hosts` runs it."""

from __future__ import annotations

from pathlib import Path

from fault_cluster import MEND_S, FaultCluster
from lab import Lab
from lab_model import make_tiny_model
from serving import Answers, Client, give_kernels
from tools import lab_or_skip

from tests.other_tandem import LATER, make_later_tandem

APPLY_S = 400.0


def test_the_model_and_then_tandem_itself_are_replaced_under_load_and_no_request_fails(tmp_path: Path) -> None:
    lab_or_skip()
    first, second = make_tiny_model(tmp_path / "first"), make_tiny_model(tmp_path / "second", seed=2)
    later = {"PYTHONPATH": str(make_later_tandem(tmp_path / "later"))}
    with Lab(tmp_path / "lab", hosts=5, ssh=False, boot_ids=True) as lab:
        give_kernels(lab)
        with FaultCluster(lab, first, {}) as cluster:
            cluster.limit_links("1gbit")
            client = Client(lab, cluster.url)
            of_first: Answers = {}
            meanwhile: Answers = {}
            of_second: Answers = {}
            in_the_end: Answers = {}
            with client.load(of_first):
                pass
            with client.load(meanwhile, contents=2):
                cluster.apply({"model": {"path": str(second)}}, timeout_s=APPLY_S)
            with client.load(of_second):
                pass
            assert all(of_first[words] != of_second[words] for words in of_first)
            assert all(set(texts) <= {*of_first[words], *of_second[words]} for words, texts in meanwhile.items())

            of_nodes = {role: {"nodes": None, "env": later} for role in ("prefill", "decode")}
            changes = {"pools": of_nodes, "router": {"env": later}, "controller": {"env": later}}
            with client.load(in_the_end):
                cluster.apply({"model": {"path": str(second)}} | changes, timeout_s=APPLY_S)
                cluster.until_whole(MEND_S)
            assert in_the_end == of_second
            assert {node["wire_version"] for node in cluster.nodes()} == {LATER}
            cluster.until_quiet()
