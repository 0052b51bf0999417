"""A scrape finds the metrics that vLLM's dashboards use, and those that Tandem's dashboard and alerts use."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tandem.kvtransfer.protocol.side import Outcome
from tandem.router.metrics import RouterMetrics
from tandem.router.recent import ADVICE, parts_of
from tandem.wire.nodes import NodeState, PoolReport, Role
from tandem.wire.requests import STEP_TOKEN_BOUNDS, NodeCounters, TierStatus, WaitHistogram
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.test_router_recent import QUICK

MONITORING = Path(__file__).resolve().parents[2] / "manifests" / "monitoring"

# What vLLM's own dashboards and the commonest others ask of `vllm:`, as samples are called.
OF_THE_ROUTER = [
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_inference_time_seconds_sum",
    "request_time_per_output_token_seconds_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_max_num_generation_tokens_bucket",
    "request_params_n_bucket",
    "request_params_max_tokens_bucket",
]
OF_ENGINES = [
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "cache_config_info",
    "iteration_tokens_total_bucket",
    "iteration_tokens_total_sum",
    "iteration_tokens_total_count",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
]


def families(router: RunningRouter) -> list[Metric]:
    return list(text_string_to_metric_families(router.client.get("/metrics").text))


@pytest.fixture(scope="module")
def kept_router(keep_router: StartRouter) -> RunningRouter:
    """A router that has answered, with nodes that have a value for every metric."""
    router = keep_router()
    counters = NodeCounters(
        preemptions=2,
        prompt_tokens_looked_up=100,
        prompt_tokens_cached=64,
        prompt_tokens_asked=36,
        prompt_tokens_received=16,
        prompt_tokens_loaded=4,
        step_tokens=[0, 3, *[0] * (len(STEP_TOKEN_BOUNDS) - 1)],
        tokens_scheduled=20,
        speculative_steps=5,
        speculative_drafted=15,
        speculative_accepted=6,
        speculative_accepted_at=[4, 2, 0],
        transfers_finished={"received": 1},
        transfer_wait_seconds={"register": WaitHistogram().plus(0.003).plus(0.25).plus(90.0)},
        requests_finished={"stop": 2},
        wrong_kv={"p0": 1},
        transfer_refusals={"stale": 1},
        transfer_blocks_freed={"sent": 2},
        pins_ended={"time": 1},
        encoder_fallbacks={"late": 1},
    )
    tier = TierStatus("cpu", 1, 8, 100, 64, 0, 0, 7, given_up=3, left_out="it hangs")
    router.nodes["d0"].set(counters=counters, status_fields={"free_blocks": 250, "tiers": [tier]})
    router.complete(max_tokens=4)
    router.wait_for(lambda: router.metric("tandem_node_preemptions_total", node="d0", role="decode") == 2, "told")
    return router


@pytest.fixture
def router(kept_router: RunningRouter) -> RunningRouter:
    return kept_router  # as it is: its tests only look


def test_a_dashboard_for_vllm_finds_its_figures(router: RunningRouter) -> None:
    found = {sample.name: sample.labels for family in families(router) for sample in family.samples}
    for name in OF_THE_ROUTER + OF_ENGINES:
        assert found[f"tandem_{name}"]["model_name"] == "fake", name
    for name in OF_ENGINES:
        assert found[f"tandem_{name}"]["engine"] in ("p0", "d0"), name
        assert found[f"tandem_{name}"]["node"] == found[f"tandem_{name}"]["engine"], "joins with the others"


def scraped(router: RunningRouter, name: str) -> dict[tuple[str, ...], float]:
    """The samples of a metric by the values of its labels, as one scrape has them."""
    return {
        tuple(value for label, value in sorted(sample.labels.items()) if label != "model_name"): sample.value
        for family in families(router)
        for sample in family.samples
        if sample.name == name
    }


def test_a_rate_sees_the_first_transfers_that_fail(router: RunningRouter) -> None:
    outcomes = scraped(router, "tandem_node_transfers_finished_total")
    assert outcomes.pop(("d0", "received", "decode")) == 1
    assert {(node, role) for node, _, role in outcomes} == {("d0", "decode")}, "p0 has transferred nothing"
    assert set(outcomes.values()) == {0}
    assert (
        {"peer_lost", "lease_expired", "incompatible", "refused"}
        <= {outcome for _, outcome, _ in outcomes}
        <= set(Outcome)
    )


def in_pool(router: RunningRouter, role: str) -> dict[str, float]:
    states = scraped(router, "tandem_pool_nodes").items()
    return {state: count for (there, state), count in states if there == role and count}


def test_a_node_that_leaves_is_not_down(start_router: StartRouter) -> None:
    """Otherwise every rollout would look like a failure."""
    router = start_router(decode=2)
    router.nodes["d1"].set(state=NodeState.DRAINING)
    router.wait_for(lambda: "d1" not in router.in_view(), "it drains")
    assert ("d1", "decode") not in scraped(router, "tandem_node_up")
    assert in_pool(router, "decode")["ready"] == 1


def test_nodes_that_died_are_down_and_others_that_are_missed_are_not(start_router: StartRouter) -> None:
    router = start_router(decode=2)
    router.nodes.pop("d1").kill()
    router.announce(PoolReport(Role.PREFILL, 1), PoolReport(Role.DECODE, 2, down={"d1": "its process ended: killed"}))
    assert scraped(router, "tandem_node_up") == {("p0", "prefill"): 1, ("d0", "decode"): 1, ("d1", "decode"): 0}
    decode, prefill = in_pool(router, "decode"), in_pool(router, "prefill")
    assert (decode["wanted"], decode["ready"]) == (2, 1)
    assert (prefill["wanted"], prefill["ready"]) == (1, 1)
    assert "ready" not in in_pool(router, "encode") | in_pool(router, "aggregated")
    # So that no scrape that was rendered before is shown.
    other = start_router()
    other.announce(PoolReport(Role.DECODE, 4, starting=1, waiting=1, left_out={"d9": "its model has other weights"}))
    assert in_pool(other, "decode") == {"wanted": 4, "ready": 1, "starting": 1, "waiting": 1, "left_out": 1}
    assert ("d9", "decode") not in scraped(other, "tandem_node_up")


def test_a_scrape_says_what_health_says(start_router: StartRouter) -> None:
    router = start_router()
    assert router.client.get("/health").status_code == 200
    assert router.metric("tandem_router_healthy") == 1
    router.remove("d0").kill()
    assert router.client.get("/health").status_code == 503
    assert scraped(router, "tandem_router_healthy") == {(): 0}


def test_every_sample_names_the_model_and_those_of_a_node_what_it_said(router: RunningRouter) -> None:
    answer = router.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert all('model_name="fake"' in line for line in answer.text.splitlines() if not line.startswith("#"))
    for name, labels, value in (
        ("transfer_wait_seconds_bucket", ("0.002", "d0", "decode", "register"), 0),
        ("transfer_wait_seconds_bucket", ("0.005", "d0", "decode", "register"), 1),
        ("transfer_wait_seconds_bucket", ("+Inf", "d0", "decode", "register"), 3),
        ("transfer_wait_seconds_count", ("d0", "decode", "register"), 3),
        ("transfer_wait_seconds_sum", ("d0", "decode", "register"), 90.253),
        ("requests_finished_total", ("d0", "stop", "decode"), 2),
        ("free_blocks", ("p0", "prefill"), 1000),
        ("tier_used_bytes", ("d0", "decode", "cpu"), 1),
        ("tier_found_tokens_total", ("d0", "decode", "cpu"), 64),
    ):
        assert scraped(router, f"tandem_node_{name}")[labels] == value
    assert scraped(router, "tandem_request_success_total")["length",] == 1
    assert scraped(router, "tandem_http_requests_total")["/v1/completions", "200"] == 1


def test_engines_and_tiers_are_shown(router: RunningRouter) -> None:
    engine = ("d0", "d0", "decode")  # its engine, its node and its role
    for name, value in (
        ("kv_cache_usage_perc", 0.75),
        ("external_prefix_cache_queries_total", 36),
        ("external_prefix_cache_hits_total", 20),
        ("iteration_tokens_total_sum", 20),
        ("iteration_tokens_total_count", 3),
    ):
        assert scraped(router, f"tandem_{name}")[engine] == value
    assert list(scraped(router, "tandem_spec_decode_num_accepted_tokens_per_pos_total").values()) == [4, 2, 0]
    of_tier = {"node": "d0", "role": "decode", "tier": "cpu"}
    assert router.metric("tandem_node_tier_left_out", **of_tier) == 1
    assert router.metric("tandem_node_tier_given_up_total", **of_tier) == 3


def test_a_request_is_counted_by_its_tokens_and_choices(start_router: StartRouter) -> None:
    router = start_router()
    router.complete(max_tokens=8, n=3, ignore_eos=True)
    for name, value in (
        ("request_params_n_sum", 3),
        ("request_max_num_generation_tokens_sum", 8),
        ("request_generation_tokens_sum", 24),
        ("generation_tokens_total", 24),
        ("request_inference_time_seconds_count", 3),
    ):
        assert router.metric(f"tandem_{name}") == value
    assert router.metric("tandem_request_params_max_tokens_bucket", le="10.0") == 3
    assert router.metric("tandem_request_params_max_tokens_bucket", le="5.0") == 0


def test_the_nodes_line_is_part_of_the_queue_and_no_part_of_the_prefill(start_router: StartRouter) -> None:
    router = start_router()
    router.nodes["p0"].set(queue_s=5.0)
    router.nodes["d0"].set(preemptions=1, pause_at=0)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(router.complete, max_tokens=2)
        # Or the decode node may be through before the prefill node has said how long its line was.
        router.wait_for(lambda: router.metric("tandem_time_to_first_token_seconds_count") == 1, "it has")
        router.nodes["d0"].resume()
        assert answer.result(10).status_code == 200
    assert router.metric("tandem_request_queue_time_seconds_sum") >= 5.0
    assert router.metric("tandem_router_queue_time_seconds_sum") < 5.0
    assert router.metric("tandem_request_prefill_time_seconds_sum") == 0.0
    assert router.metric("tandem_requests_preempted_total") == 1


def test_the_alerts_say_what_the_page_advises() -> None:
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    said = {rule["alert"]: rule["annotations"]["description"] for group in groups for rule in group["rules"]}
    for alert, cause in (
        ("TandemQueueStands", "the router's line"),
        ("TandemSlowFirstToken", "a node's line"),
        ("TandemSlowTokens", "writing the answer"),
        ("TandemFailovers", "it moved to another node"),
        ("TandemPreemptions", "it lost its blocks and was computed again"),
    ):
        assert ADVICE[cause] in said[alert]


def test_every_cause_has_its_advice() -> None:
    assert {name for name, _ in parts_of(QUICK)} < set(ADVICE)
    # Prometheus sees no increase in a series that begins at 1.
    for reason in (b"queue_full", b"long_wait"):
        refused = b'tandem_requests_refused_total{model_name="m",reason="%s"} 0.0' % reason
        assert refused in RouterMetrics("m").render(), "what is rare is counted from nothing"


def named(text: str) -> set[str]:
    return set(re.findall(r"\btandem_[a-z0-9_]+", text))


@pytest.mark.parametrize("file", ["grafana-dashboard.json", "alerts.yaml"])
def test_what_is_asked_for_is_there(router: RunningRouter, file: str) -> None:
    text = (MONITORING / file).read_text(encoding="utf-8")
    if file.endswith("json"):
        text = "\n".join(target["expr"] for panel in json.loads(text)["panels"] for target in panel.get("targets", ()))
    else:
        groups = yaml.safe_load(text)["groups"]
        text = "\n".join(rule["expr"] for group in groups for rule in group["rules"])
    shown = {sample.name for family in families(router) for sample in family.samples}
    assert named(text) - shown <= {"tandem_task_restarts_total"}  # a task that never died has none
