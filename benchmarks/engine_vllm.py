"""vLLM's engine under the same work, in its own Python: reads the work from stdin and prints the seconds of each step.

`benchmarks.engine --vllm DIR` starts it. It imports nothing of Tandem, which is not installed there.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

# The engine in this process, so that its steps can be timed.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Bench:
    def __init__(self, work: dict[str, Any]) -> None:
        from vllm import LLM

        llm = LLM(
            model=work["model"],
            dtype=work["dtype"],
            max_model_len=work["max_model_len"],
            max_num_batched_tokens=work["max_num_batched_tokens"],
            max_num_seqs=work["max_num_seqs"],
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self.llm, self.engine, self.count = llm, llm.llm_engine, 0

    def add(self, prompt: list[int], tokens: int) -> Any:
        from vllm import SamplingParams

        self.count += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return self.engine.add_request(f"r{self.count}", {"prompt_token_ids": prompt}, sampling)

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def prefill(self, prompt: list[int]) -> float:
        self.add(prompt, 1)
        return timed(self.finish)

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        names = [self.add(prompt, steps + len(prompts) + 2) for prompt in prompts]
        begun: set[str] = set()
        while len(begun) < len(names):
            begun.update(output.request_id for output in self.engine.step())
        self.engine.step()
        median = statistics.median(timed(self.engine.step) for _ in range(steps))
        self.engine.abort_request(list(begun))
        self.finish()
        return median


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    work = json.load(sys.stdin)
    bench = Bench(work)
    for prompt in work["prefill"]:
        taken = [bench.prefill(prompt) for _ in range(work["repeats"] + 1)]
        print(json.dumps({f"prefill {len(prompt)}": statistics.median(taken[1:])}), flush=True)
    for prompts in work["decode"]:
        seconds = bench.decode(prompts, work["decode_steps"])
        print(json.dumps({f"decode {len(prompts)} x {len(prompts[0])}": seconds}), flush=True)


if __name__ == "__main__":
    main()
