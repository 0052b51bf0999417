"""Where a step's time goes on a device: choosing tokens, the kernels' own time, the host's time."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.lib.engines import EngineBench
from tandem.engine.core import Engine
from tandem.engine.model.batching import RequestRows, SamplingTable
from tandem.engine.model.sampling.sampler import Sampler
from tandem.wire.sampling import SamplingParams

MODES = {
    "greedy": SamplingParams(temperature=0.0),
    "all tokens": SamplingParams(seed=1),
    "top_p 0.95": SamplingParams(seed=1, top_p=0.95),
    "top_k 40, top_p 0.95": SamplingParams(seed=1, top_k=40, top_p=0.95),
    "top_k 1000": SamplingParams(seed=1, top_k=1000),
}


def sampling_times(
    vocab: int, dtype: torch.dtype, device: torch.device, batches: tuple[int, ...], repeats: int
) -> list[dict[str, Any]]:
    """Returns the time to choose one token for each row of a batch. The limit is the time to read the logits once."""
    rows = []
    for batch in batches:
        logits = torch.randn(batch, vocab, device=device).mul_(2).to(dtype)
        requests = RequestRows(batch, 8, 16, 1)
        for row in range(batch):
            requests.add(str(row), [5, 6, 7], 3, [[1]])
        for name, params in MODES.items():
            table = SamplingTable(batch)
            for row in range(batch):
                table.set(row, params)
            sampler = Sampler(vocab, frozenset(), device)
            taken = []
            with torch.inference_mode():
                for _ in range(repeats + 1):
                    began = time.perf_counter()
                    tokens = sampler.sample(logits, np.arange(batch), np.full(batch, 3), requests, table)
                    tokens.tolist()  # waits for the device
                    taken.append(time.perf_counter() - began)
            rows.append(
                {"what": f"{name} x {batch}", "ms": statistics.median(taken[1:]) * 1e3, "logits_bytes": logits.nbytes}
            )
    return rows


def decode_parts(engine: Engine, batch: int, vocab: int, device: torch.device, steps: int) -> dict[str, Any]:
    """Runs decode steps under torch's profiler. Returns the time of all kernels compared with the time between steps, the number of kernels,
    and this thread's CPU time for a step, which does not include waiting for the device."""
    on_device = device.type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if on_device else torch.profiler.ProfilerActivity.CPU
    with EngineBench(engine, vocab).decoding(batch, 64, 4 * steps + batch + 8):
        for _ in range(3):
            engine.step()
        began = time.perf_counter()
        for _ in range(steps):
            engine.step()
        wall = (time.perf_counter() - began) / steps
        with torch.profiler.profile(activities=[kind]) as profiled:
            for _ in range(steps):
                engine.step()
        began = time.thread_time()
        for _ in range(steps):
            engine.step()
        host = (time.thread_time() - began) / steps
    events = profiled.key_averages()
    spent = sum(event.self_device_time_total if on_device else event.self_cpu_time_total for event in events)
    return {
        "what": f"decode {batch} x 64",
        "wall_ms": wall * 1e3,
        "kernels_ms": spent / steps / 1e3,
        "kernels": sum(event.count for event in events) / steps,
        "host_ms": host * 1e3,
    }
