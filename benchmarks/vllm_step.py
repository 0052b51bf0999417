"""What Tandem adds to a step of a decode node whose engine is vLLM, in the step thread's CPU time. vLLM's Python runs it, from the
repository's root.

    /opt/vllm/bin/python -m benchmarks.vllm_step MODEL [--dtype bfloat16] [--users 8] [--tokens 700] [--steps 150] [--json FILE]

MODEL is a local folder. The requests write while no peer sends anything: transfers are carried out by another thread.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.lib.harness import parser_of, report, run
from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tandem.engine.request import Request
from tandem.engine.vllm.wing import make
from tandem.engine.wings import Connect
from tandem.kvtransfer.base import ConnectorMetadata, ConnectorOutput, KVCacheMemory, WorkerConnector
from tandem.kvtransfer.protocol.halves import SchedulerHalf
from tandem.wire.requests import RequestFacts
from tandem.wire.sampling import SamplingParams

cpu = time.thread_time


class NoPeers(WorkerConnector):
    def register_kv_caches(self, memory: KVCacheMemory) -> None: ...
    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None: ...
    def get_finished(self, finished_req_ids: set[str]) -> ConnectorOutput:
        return ConnectorOutput()


class Meter:
    """Adds up the CPU time of calls, by what they belong to."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)

    def watch(self, owner: Any, name: str, of: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **named: Any) -> Any:
            began = cpu()
            try:
                return call(*args, **named)
            finally:
                self.spent[of] += cpu() - began

        setattr(owner, name, watched)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    for name, value in (("users", 8), ("tokens", 700), ("steps", 150)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    model = ModelConfig(
        path=asked.model, dtype=asked.dtype, device="cpu", engine="vllm", engine_args={"enforce_eager": True}
    )
    config = EngineConfig(
        model=model,
        cache=CacheConfig(memory_bytes=1 << 29),
        scheduler=SchedulerConfig(max_model_len=asked.tokens + 2 * asked.steps, max_num_seqs=asked.users),
    )
    connect = Connect(lambda groups, lines: (SchedulerHalf(groups[0].block_size), NoPeers()), False)
    engine: Any = make(config, model, lambda what, share: None, connect)
    from tandem.engine.vllm.connector import TandemConnector

    meter, began = Meter(), cpu()
    for user in range(asked.users):
        prompt = [(user * 131 + i * 7) % 5000 + 10 for i in range(asked.tokens)]
        sampling = SamplingParams(max_tokens=2 * asked.steps, temperature=0.0, ignore_eos=True)
        engine.add_request(Request(f"user-{user}", RequestFacts(prompt_token_ids=prompt, sampling=sampling)))
    added = (cpu() - began) / asked.users
    begun: set[str] = set()
    while len(begun) < asked.users:
        begun |= {chunk.request_id for chunk in engine.step().updates}
    meter.watch(engine._core, "step_fn", "vllm")
    for name in ("build_connector_meta", "bind_connector_metadata", "wait_for_save", "get_transfer_results"):
        meter.watch(TandemConnector, name, "connector")
    steps = []
    for _ in range(asked.steps):
        began = cpu()
        engine.step()
        steps.append(1000 * (cpu() - began))
    engine.shutdown()
    vllm, connector = meter.spent["vllm"], meter.spent["connector"]
    ours = (sum(steps) / 1000 - vllm + connector) / asked.steps
    figures = {
        "step_ms": statistics.median(steps),
        "tandem_ms": 1000 * ours,
        "connector_ms": 1000 * connector / asked.steps,
        "add_request_ms": 1000 * added,
    }
    return report(asked, figures, "\n".join(f"{name:16} {value:8.3f}" for name, value in figures.items()))


if __name__ == "__main__":
    run(main)
