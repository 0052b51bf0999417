"""Where a step's time goes in the native library: each kind of work, compared with the machine's limit.

    python -m benchmarks.native_kernels MODEL [--threads N] [--dtype bfloat16] [--limit avx512] [--widened] [--json FILE]

MODEL is a local folder of the Llama family, or a GGUF file. Matrix products are shown as their rate; in decodes, which wait for the weights,
as the rate at which weights are read. Attention in decodes is shown as the rate at which KV is read. With --widened every step is also
measured with the model's blocks widened.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.machine import measure_limits
from benchmarks.lib.tables import table_of
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.model.attention.layers import AttentionLayer, plan_cache
from tandem.engine.model.batching import tensors_of
from tandem.engine.model.checkpoint import read_config
from tandem.engine.model.memory import allocate_cache
from tandem.engine.model.native.architecture import Architecture, describe
from tandem.engine.model.native.forward import Checkpoint, NativeLlamaForward, Take
from tandem.engine.model.runner import Batch, HostBatch
from tandem.engine.model.source import ModelSource, find_source
from tandem.engine.model.weight_formats import weight_format
from tandem.kernels.library import BlockRows, Weights, widen

BLOCK_SIZE = 16
PREFILLS = (128, 512, 2048)
DECODES = ((1, 128), (1, 1024), (1, 4096), (8, 128), (8, 1024), (32, 128), (32, 1024))
PRODUCTS = ("qkv", "o", "gate_up", "down")


class KernelStep(msgspec.Struct, frozen=True):
    name: str
    requests: int
    queries: int  # per request
    context: int  # per request, these queries included
    seconds: float  # the best of several
    phases: dict[str, float]  # seconds, the mean


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("model", help="a local model folder")
    parser.add_argument("--threads", type=int, default=0, help="all cores of this process by default")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--limit", default="", help="no instruction set better than this one")
    parser.add_argument("--widened", action="store_true", help="also with blocks widened to the dtype")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    source = find_source(options.model)
    config = read_config(source)
    forwards = {"": load(source, config, options, dtype)}
    if options.widened:
        forwards[", widened"] = load(source, config, options, dtype, widened=True)
    architecture = describe(config)
    shapes = [(f"prefill {n}", 1, n, n) for n in PREFILLS]
    shapes += [(f"decode {batch} x {context}", batch, 1, context) for batch, context in DECODES]
    steps, rows = [], []
    for name, *shape in shapes:
        for how, forward in forwards.items():
            step = measure(forward, architecture, dtype, options.repeats, name + how, *shape)
            steps.append(step)
            rows.append(row_of(step, architecture, dtype.itemsize, bytes_per_weight(forward, architecture)))
    for forward in forwards.values():
        forward.close()
    limits = measure_limits(dtype, torch.device("cpu"), options.threads or torch.get_num_threads())
    figures = {"limits": limits, "steps": steps}
    return report(options, figures, table_of(f"milliseconds a step; torch's best: {limits}", rows))


def load(
    source: ModelSource, config: Any, options: Any, dtype: torch.dtype, *, widened: bool = False
) -> NativeLlamaForward:
    found = weight_format(source, config)
    stored = found.stored_tensors(config) if found is not None else None
    stored_take: Take = stored.take if stored is not None else Checkpoint(source.folder, dtype).take

    def take(name: str) -> Weights | None:
        weights = stored_take(name)
        return widen(weights, dtype) if widened and isinstance(weights, BlockRows) else weights

    return NativeLlamaForward(
        config,
        take,
        dtype=dtype,
        threads=options.threads,
        rotary=stored.rotary() if stored is not None else None,
        instruction_set=options.limit,
    )


def bytes_per_weight(forward: NativeLlamaForward, a: Architecture) -> float:
    return forward.weight_bytes / (_matrix_elements(a) + a.vocab * a.hidden)


def measure(
    forward: NativeLlamaForward,
    a: Architecture,
    dtype: torch.dtype,
    repeats: int,
    name: str,
    requests: int,
    queries: int,
    context: int,
) -> KernelStep:
    blocks = -(-context // BLOCK_SIZE)
    layers = tuple(
        AttentionLayer(index, a.heads, a.kv_heads, a.head_dim, a.head_dim, None) for index in range(a.layers)
    )
    cache = allocate_cache(plan_cache(layers, BLOCK_SIZE), requests * blocks + 1, dtype, torch.device("cpu"))
    cache.fill_(0.1)
    forward.use_cache(cache, (KVCacheGroup(AttentionKind.FULL, BLOCK_SIZE, tuple(range(a.layers))),))
    batch = make_batch(a, requests, queries, context, blocks)
    forward(batch)
    times = []
    forward.profile(True)
    for _ in range(repeats):
        started = time.perf_counter()
        forward(batch)
        times.append(time.perf_counter() - started)
    phases = {phase: total / repeats / 1e9 for phase, total in forward.profile(False).items()}
    return KernelStep(name, requests, queries, context, min(times), phases)


def make_batch(a: Architecture, requests: int, queries: int, context: int, blocks: int) -> Batch:
    """Makes a batch in which every request computes its last `queries` tokens; its blocks are anywhere in the cache."""
    rng = np.random.default_rng(0)
    tables = (1 + rng.permutation(requests * blocks)).astype(np.int32).reshape(requests, blocks)
    positions = np.tile(np.arange(context - queries, context), requests)
    owner = np.repeat(np.arange(requests), queries)
    slots = tables[owner, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = np.arange(requests + 1, dtype=np.int32) * queries
    contexts = np.full(requests, context, np.int32)
    host = HostBatch(positions, starts, contexts, (slots,), (tables,), starts[1:].astype(np.int64) - 1)
    tensors, (tokens,) = tensors_of(host, torch.device("cpu"), rng.integers(0, a.vocab, requests * queries))
    return Batch(token_ids=tokens, num_decodes=requests if queries == 1 else 0, host=host, **tensors)


def row_of(step: KernelStep, a: Architecture, element_bytes: int, weight_bytes: float) -> dict[str, str]:
    weights, products = _matrix_elements(a), sum(step.phases[name] for name in PRODUCTS)
    attention = step.phases["attention"]
    row = {"step": step.name, "in all": f"{step.seconds * 1e3:.1f}"}
    row |= {name: f"{seconds * 1e3:.2f}" for name, seconds in step.phases.items()}
    if step.queries > 1:
        pairs = step.queries * (2 * step.context - step.queries + 1) / 2 * step.requests
        flops = 4 * pairs * a.heads * a.head_dim * a.layers
        of_products = 2 * step.requests * step.queries * weights
        return row | {
            "products at": f"{of_products / products / 1e9:.0f} GFLOP/s",
            "attention at": f"{flops / attention / 1e9:.0f} GFLOP/s",
        }
    kv = 2 * step.requests * step.context * a.kv_heads * a.head_dim * a.layers * element_bytes
    return row | {
        "products at": f"{weights * weight_bytes / products / 1e9:.1f} GB/s",
        "attention at": f"{kv / attention / 1e9:.1f} GB/s",
    }


def _matrix_elements(a: Architecture) -> int:
    """Returns the number of elements in the matrices that every token passes: all but the embedding and the head."""
    attention = a.hidden * a.head_dim * (a.heads + 2 * a.kv_heads) + a.heads * a.head_dim * a.hidden
    return a.layers * (attention + 3 * a.hidden * a.intermediate)


if __name__ == "__main__":
    run(main)
