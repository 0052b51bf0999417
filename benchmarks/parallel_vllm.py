"""vLLM's multiprocessing executor, in its own Python: what telling its workers a step costs if they compute nothing.

`benchmarks.parallel --vllm DIR` starts it with the model's folder, the number of workers and of requests. The executor, its queues in shared
memory and its messages are vLLM's; the workers answer at once with a token for each request. Prints a JSON object.
"""

import json
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# Workers import this module by its name.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerBase

STEPS = 300
BLOCK_SIZE = 16


class IdleWorker(WorkerBase):  # type: ignore[misc]
    def init_device(self) -> None:
        pass

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        pass

    def execute_model(self, scheduler_output: Any) -> Any:
        names = scheduler_output.scheduled_cached_reqs.req_ids
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7]] * len(names),
        )


def step_of(requests: int, number: int) -> Any:
    """Makes the step that the scheduler makes when all requests decode: one in sixteen gets a new block."""
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    names = [f"cmpl-{index:032x}-0" for index in range(requests)]
    step = SchedulerOutput.make_empty()
    step.scheduled_cached_reqs = CachedRequestData(
        req_ids=names,
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[
            ([number + index],) if (number + index) % BLOCK_SIZE == 0 else None for index in range(requests)
        ],
        num_computed_tokens=[512 + number] * requests,
        num_output_tokens=[number] * requests,
    )
    step.num_scheduled_tokens = dict.fromkeys(names, 1)
    step.total_num_scheduled_tokens = requests
    return step


def main() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    folder, width, requests = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    config = EngineArgs(
        model=folder, dtype="float32", tensor_parallel_size=width, distributed_executor_backend="mp"
    ).create_engine_config()
    config.parallel_config.worker_cls = "parallel_vllm.IdleWorker"
    executor = MultiprocExecutor(config)
    telling, answered = [], []
    try:
        for number in range(STEPS):
            step = step_of(requests, number)
            began = time.perf_counter()
            future = executor.execute_model(step, non_block=True)
            told = time.perf_counter()
            future.result()
            answered.append(time.perf_counter() - began)
            telling.append(told - began)
    finally:
        executor.shutdown()
    print(json.dumps({"telling": statistics.median(telling), "answered": statistics.median(answered)}), flush=True)


if __name__ == "__main__":
    main()
