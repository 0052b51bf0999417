"""The canary computes received KV again and compares: right KV passes, wrong KV is found and no longer cached."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tandem.engine.config import CacheConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.request import Request
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.kvtransfer.base import NULL_BLOCK_ID
from tandem.node.canary.part import CanaryChecks
from tandem.wire.sampling import SamplingParams
from tests.engine.made_requests import made_request
from tests.engine.model import tiny
from tests.engine.model.driver import load

PROMPT = [(7 * i + 3) % 90 + 5 for i in range(200)]


class Node:
    """A real engine with a tiny model. KV that it computes itself takes the place of KV from a peer."""

    def __init__(self, path: Path, native: bool, share: float = 1.0, *, exact: bool = False) -> None:
        self.runner = load(path, native=native)
        info = self.runner.info
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=64), CacheConfig(), info.groups, info.num_blocks, info.max_model_len
        )
        self.engine = Engine(self.scheduler, self.runner, None, debug=True)
        self.checks = self.engine.idle_check = CanaryChecks(self.scheduler, self.runner, share, exact=exact)
        self.findings = self.checks.findings
        self.free = self.scheduler.stats().free_blocks

    def receive(self, name: str, prompt: list[int]) -> Request:
        request = made_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=2))
        self.engine.add_request(request)
        while self.scheduler.has_unfinished_requests():
            self.engine.step()
        self.checks.received(request)
        return request

    def idle(self) -> None:
        for _ in range(50):
            if not self.engine.use_idle_time():
                return
            self.scheduler.check_integrity()
        pytest.fail("the canary does not come to an end")

    def cached_blocks(self, request: Request) -> list[int]:
        tables, _ = self.scheduler.find_prefix(request)
        return [block for table in tables for block in table if block != NULL_BLOCK_ID]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def node(llama: Path) -> Node:
    return Node(llama, native=True)


KINDS = [("llama", True), ("llama", False), ("gemma3", False)]


@pytest.mark.parametrize(("architecture", "native"), KINDS)
@pytest.mark.parametrize("times", [1, -1, float("nan")], ids=["right", "wrong", "no number"])
def test_only_wrong_kv_is_counted_named_and_no_longer_cached_and_every_block_comes_back(
    architecture: str, native: bool, times: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(tiny.save(architecture, tmp_path), native)
    request = node.receive("r", PROMPT)
    node.runner.kv_cache[node.cached_blocks(request)[-1]] *= times
    node.idle()
    is_wrong = times != 1
    assert (node.findings.checked, node.findings.wrong) == (1, {"a connector": 1} if is_wrong else {})
    assert bool(node.cached_blocks(request)) != is_wrong
    assert ("the KV of r, received from a connector, is wrong in 1 of" in caplog.text) == is_wrong
    assert node.scheduler.stats().free_blocks == node.free


@pytest.mark.parametrize("exact", [True, False])
def test_where_the_same_bits_are_required_one_other_bit_is_wrong(
    exact: bool, llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(llama, native=True, exact=exact)
    request = node.receive("r", PROMPT)
    block, size = node.cached_blocks(request)[5], node.runner.info.groups[0].block_size
    number = node.runner.kv_cache[block, 1, 0, 1, 3].view(torch.int32)
    number[2] ^= 1
    node.idle()
    assert node.findings.wrong == ({"a connector": 1} if exact else {})
    where = f"first in block 5 (token {5 * size + 3}) of layer 1: "
    assert (where in caplog.text) == exact


def test_a_request_that_arrives_is_served_at_once_and_the_check_begins_again(node: Node) -> None:
    node.receive("r", PROMPT)
    assert node.engine.use_idle_time()
    assert node.scheduler.stats().free_blocks < node.free
    node.engine.add_request(made_request("other", [9, *PROMPT], SamplingParams(temperature=0.0, max_tokens=2)))
    assert node.scheduler.stats().free_blocks == node.free
    node.scheduler.check_integrity()
    assert not node.engine.use_idle_time()
    while node.scheduler.has_unfinished_requests():
        node.engine.step()
    node.idle()
    assert (node.findings.checked, node.findings.wrong) == (1, {}), "the first prompt; only one is checked at a time"


def test_a_prompt_that_fills_no_block_is_left_out(node: Node) -> None:
    node.receive("short", PROMPT[:3])
    assert node.checks.current is None


def test_the_newest_of_those_that_wait_is_checked(node: Node) -> None:
    node.receive("r", PROMPT)
    second = node.receive("second", [9, *PROMPT])
    node.runner.kv_cache[node.cached_blocks(second)[0]] *= -1
    node.idle()
    assert (node.findings.checked, node.findings.wrong) == (1, {"a connector": 1})


def test_blocks_that_were_evicted_meanwhile_are_not_judged(node: Node) -> None:
    request = node.receive("r", PROMPT)
    node.scheduler.state.cache.uncache(node.cached_blocks(request))
    node.idle()
    assert (node.findings.checked, node.findings.wrong) == (0, {})


@pytest.mark.parametrize(("drawn", "is_checked"), [(0.49, True), (0.7, False)])
def test_only_a_share_is_checked(drawn: float, is_checked: bool, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(llama, native=False, share=0.5)
    monkeypatch.setattr(random, "random", lambda: drawn)
    node.receive("r", PROMPT)
    assert (node.checks.current is not None) == is_checked
