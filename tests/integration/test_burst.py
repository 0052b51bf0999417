"""A burst of prompts at a real prefill node and a real decode node: prompts that wait are computed only once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from tandem.decode_node.node import DecodeNode
from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tandem.engine.model.loading import load_runner
from tandem.engine.model.runner import LayerHooks, StartedStep
from tandem.engine.scheduling.output import SchedulerOutput
from tandem.kvtransfer.config import TransferConfig
from tandem.node.config import NodeConfig
from tandem.prefill_node.node import PrefillNode
from tandem.router.config import Heartbeat, LocalPrefill, RouterConfig, Timeouts
from tandem.wire.nodes import NodeInfo, Role
from tests.engine.model.tiny import VOCAB, save
from tests.router.conftest import LETTERS, RunningRouter

PROMPTS = 48
PROMPT_TOKENS = 90
OUTPUT_TOKENS = 8
PREFILL_TOKENS_PER_S = 450.0
TRANSFER_TIMEOUT_S = 3.2  # the last prompt waits three times as long before it is computed


class RealNode:
    """A whole node, with a model that takes long to compute a prompt."""

    def __init__(self, role: Role, folder: str, blocks: int) -> None:
        engine = EngineConfig(
            model=ModelConfig(path=folder, served_name="fake", dtype="float32", threads=1),
            cache=CacheConfig(block_size=16, memory_bytes=blocks * 2 * 2 * 2 * 8 * 16 * 4),
            scheduler=SchedulerConfig(max_num_batched_tokens=256, step_target_ms=0),
        )
        transfer = TransferConfig(timeout_s=TRANSFER_TIMEOUT_S, lease_s=30.0)
        config = NodeConfig(f"{role.value}-0", role, engine=engine, transfer=transfer)
        runner = load_runner(engine.model, engine.cache, engine.scheduler)
        start = runner.start

        def slowly(step: SchedulerOutput, hooks: LayerHooks | None = None) -> StartedStep:
            time.sleep(step.num_prompt_tokens / PREFILL_TOKENS_PER_S + 0.002)
            return start(step, hooks)

        runner.start = slowly  # type: ignore[method-assign]
        self.node = PrefillNode(config) if role is Role.PREFILL else DecodeNode(config)
        info = self.node.start(runner=runner)
        self.info: NodeInfo = msgspec.structs.replace(info, tokenizer="")

    def kill(self) -> None:
        self.node.stop()


@pytest.fixture
def cluster(model_folder: str, tmp_path: Path) -> Iterator[RunningRouter]:
    folder = str(save("llama", tmp_path / "tiny"))
    config = RouterConfig(
        tokenizer_path=model_folder,
        model_name="fake",
        port=0,
        # Long, so that a busy machine does not fail the test
        heartbeat=Heartbeat(silence=20.0, starved=20.0),
        local_prefill=LocalPrefill.NEVER,
        timeouts=Timeouts(token_idle=1.0, queue=60.0),
    )
    running = RunningRouter(config, LETTERS, eos=1)
    running.nodes["prefill-0"] = RealNode(Role.PREFILL, folder, 2000)  # type: ignore[assignment]
    running.nodes["decode-0"] = RealNode(Role.DECODE, folder, 256)  # type: ignore[assignment]
    running.announce()
    running.wait_ready()
    yield running
    running.close()


def test_of_a_burst_of_prompts_none_is_computed_twice(cluster: RunningRouter) -> None:
    """The prompts wait at the prefill node for three times the transfer timeout, and the decode node has blocks for 36 of the 48."""
    answers: list[httpx.Response] = []

    def ask(number: int) -> None:
        prompt = [3 + (7 * number + at * (1 + number % 5)) % (VOCAB - 3) for at in range(PROMPT_TOKENS)]
        body = {"model": "fake", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}
        with cluster.new_client() as client:
            answers.append(client.post("/v1/completions", json=body, timeout=60))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(PROMPTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert [answer.status_code for answer in answers] == [200] * PROMPTS
    prefill, decode = (
        cluster.nodes[name].node.status().counters  # type: ignore[attr-defined]
        for name in ("prefill-0", "decode-0")
    )
    asked = PROMPTS * PROMPT_TOKENS
    computed = prefill.prompt_tokens_computed + decode.prompt_tokens_computed
    print(f"{computed} of {asked} prompt tokens were computed; transfers: {decode.transfers_finished}")
    assert computed <= 1.05 * asked
    assert decode.transfers_finished.get("timed_out", 0) == 0
    assert cluster.metric("tandem_failovers_total", reason="node_lost") == 0
