"""One model's steps on a device: prefill, decode, a chunk behind a long prefix, a chunk beside decodes. Each is shown beside the limit and
beside what torch and FlashInfer take alone."""

from __future__ import annotations

import importlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open

from benchmarks.gpu_profile import decode_parts
from benchmarks.gpu_report import Dtype, Report, note
from benchmarks.lib.costs import read_costs
from benchmarks.lib.engines import EngineBench, TimedStep, engine_of
from benchmarks.lib.machine import measure_limits
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.checkpoint import read_config
from tandem.engine.model.loading import load_runner
from tandem.engine.model.source import find_source
from tandem.engine.model.torch_runner import TorchRunner

_REPEATS = 5
# Products with the same input, which engines compute as one.
_TOGETHER = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gated", "up_proj": "gated"}


class Products:
    """The matrices of one layer with random numbers, and the head, as often as the model has layers. Experts are left out."""

    def __init__(self, folder: Path, layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layers = layers
        shapes: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    shape = tuple(opened.get_slice(name).get_shape())
                    if ".layers.0." in name and len(shape) == 2 and name.endswith(".weight"):
                        word = name.split(".")[-2]
                        if ".experts." not in name:
                            shapes[_TOGETHER.get(word, word)].append(shape)
                    elif name == "lm_head.weight":
                        shapes["head"].append(shape)
        self._head: list[torch.Tensor] = []
        self._of_layer: list[torch.Tensor] = []
        for name, parts in shapes.items():
            rows = sum(shape[0] for shape in parts)
            made = torch.randn(rows, parts[0][1], device=device).to(dtype)
            (self._head if name == "head" else self._of_layer).append(made)

    def seconds(self, rows: int, sampled: int) -> float:
        """For a step of so many rows, of which so many get logits."""
        layer = sum(self._of_one(matrix, rows) for matrix in self._of_layer)
        return self._layers * layer + sum(self._of_one(matrix, sampled) for matrix in self._head)

    @staticmethod
    def _of_one(matrix: torch.Tensor, rows: int) -> float:
        given = matrix.new_ones(rows, matrix.shape[1])
        # Several in a row, so that launching them costs nothing.
        return timed(lambda: torch.nn.functional.linear(given, matrix), matrix.device, times=8)


def timed(work: Callable[[], Any], device: torch.device, times: int) -> float:
    """Seconds of one run, as the median of several measurements of `times` runs."""
    work()
    taken = []
    for _ in range(_REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append((time.perf_counter() - began) / times)
    return statistics.median(taken)


def attention_seconds(
    layers: int,
    heads: int,
    kv_heads: int,
    dim: int,
    counts: list[int],
    contexts: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> float | None:
    """FlashInfer's own kernels for requests of so many rows and keys, in all layers; None without FlashInfer. Each request has pages of
    its own."""
    if device.type != "cuda" or importlib.util.find_spec("flashinfer") is None:
        return None
    flashinfer = importlib.import_module("flashinfer")
    size = 16
    pages = torch.tensor([-(-context // size) for context in contexts])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), pages.cumsum(0))).int()
    cache = torch.randn(int(starts[-1]), 2, kv_heads, size, dim, device=device, dtype=dtype)
    rows = torch.cat((torch.zeros(1, dtype=torch.int64), torch.tensor(counts).cumsum(0))).int()
    last = torch.tensor([(context - 1) % size + 1 for context in contexts], dtype=torch.int32)
    hopper = torch.cuda.get_device_capability(device)[0] == 9 and max(counts) > 16
    workspace = torch.empty(384 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa3" if hopper else "fa2")
    wrapper.plan(
        rows,
        starts,
        torch.arange(int(starts[-1]), dtype=torch.int32, device=device),
        last,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim_qk=dim,
        page_size=size,
        causal=True,
        q_data_type=dtype,
        kv_data_type=dtype,
    )
    query = torch.randn(int(rows[-1]), heads, dim, device=device, dtype=dtype)
    out = torch.empty_like(query)
    return layers * timed(lambda: wrapper.run(query, (cache[:, 0], cache[:, 1]), out=out), device, times=8)


class Sizes(msgspec.Struct, frozen=True):
    prefills: tuple[int, ...] = (128, 512, 2048, 8192)
    decodes: tuple[tuple[int, int], ...] = ((1, 1024), (64, 1024), (256, 1024), (64, 4096))
    behind: tuple[int, int] = (400, 30_000)  # a chunk's tokens, and those before it in the cache
    beside: tuple[int, int, int] = (2048, 64, 4096)  # a chunk's tokens, and decodes of so many tokens beside it
    tokens_per_step: int = 8192
    repeats: int = 5
    decode_steps: int = 24


QUICK = Sizes((128, 512), ((1, 128), (8, 128)), (40, 600), (64, 4, 128), 2048, 2, 4)
DRY = Sizes((16,), ((2, 16),), (8, 64), (16, 2, 32), 256, 1, 2)


class SpeedBench:
    def __init__(
        self, path: Path, dtype: Dtype, device: torch.device, kv_memory: int | None, sizes: Sizes, report: Report
    ) -> None:
        self._path, self._device, self._sizes, self._report = path, device, sizes, report
        self._cache = CacheConfig(prefix_caching=True, memory_bytes=kv_memory)
        chunk, before = sizes.behind
        longest = max(*sizes.prefills, *(context for _, context in sizes.decodes), chunk + before)
        self._config = SchedulerConfig(
            max_num_seqs=max(batch for batch, _ in sizes.decodes) + 1,
            max_num_batched_tokens=sizes.tokens_per_step,
            max_model_len=longest + 640,
            step_target_ms=0,  # all requests of a batch must have begun before the first one ends
        )
        began = time.perf_counter()
        # On a CPU this takes a GPU's code path as far as it goes.
        model = ModelConfig(path=str(path), dtype=dtype, device=str(device))
        self._runner = load_runner(model, self._cache, self._config, native=device.type == "cuda")
        info = self._runner.info
        self._dtype = getattr(torch, info.dtype)
        report.row("loading", seconds=time.perf_counter() - began)
        report.row("computed by", path=computed_by(self._runner), dtype=info.dtype, blocks=info.num_blocks)
        note("the card's limits")
        self._limits = measure_limits(self._dtype, device, torch.get_num_threads(), roughly=device.type == "cpu")
        report.row("limits", **msgspec.to_builtins(self._limits))
        kv_bytes = self._runner.kv_cache[0].numel() * self._runner.kv_cache.element_size()
        self._costs = read_costs(path, self._dtype, kv_bytes * len(info.groups) // self._cache.block_size)
        self._text = read_config(find_source(str(path))).get_text_config()
        self._products = Products(path, self._text.num_hidden_layers, self._dtype, device)

    def run(self) -> None:
        sizes, bench = self._sizes, self._bench(prefix_caching=False)
        info = self._runner.info
        room = (info.num_blocks - 1) * self._cache.block_size // len(info.groups)
        decodes = [(batch, context) for batch, context in sizes.decodes if batch * (context + 320) <= room]
        for step in bench.decodes(decodes, sizes.decode_steps):
            self._step(step)
        for step in bench.prefills(sizes.prefills, sizes.repeats):
            self._step(step)
        self._behind(*sizes.behind)
        self._beside(*sizes.beside)
        engine = self._engine(prefix_caching=False)
        for batch, _ in decodes:
            row = decode_parts(engine, batch, info.vocab_size, self._device, sizes.decode_steps // 2)
            self._report.row(f"parts of {row.pop('what')}", **row)
        self._report.row("memory", **self._memory())

    def _engine(self, *, prefix_caching: bool) -> Engine:
        self._runner.forget_requests()
        cache = msgspec.structs.replace(self._cache, prefix_caching=prefix_caching)
        return engine_of(self._runner, cache, self._config)

    def _bench(self, *, prefix_caching: bool) -> EngineBench:
        return EngineBench(self._engine(prefix_caching=prefix_caching), self._runner.info.vocab_size)

    def _behind(self, chunk: int, before: int) -> None:
        """A chat's next turn: new tokens behind those that the cache has."""
        bench, vocab = self._bench(prefix_caching=True), self._runner.info.vocab_size
        prefix = [3 + place % (vocab - 3) for place in range(before)]
        bench.prefill(prefix)
        taken = []
        for turn in range(self._sizes.repeats):
            new = [3 + (7 * place + turn + 1) % (vocab - 3) for place in range(chunk)]
            taken.append(bench.prefill(prefix + new))
        self._step(TimedStep(f"{chunk} behind {before}", statistics.median(taken), [chunk], [before + chunk]))

    def _beside(self, chunk: int, decodes: int, context: int) -> None:
        """The step in which a prompt's chunk and decodes are computed together, from the prompt's arrival to its first token."""
        bench, vocab = self._bench(prefix_caching=False), self._runner.info.vocab_size
        prompt = [3 + 11 * place % (vocab - 3) for place in range(chunk)]
        with bench.decoding(decodes, context, 512):
            taken = [bench.prefill(prompt) for _ in range(self._sizes.repeats)]
        what = f"{chunk} beside {decodes} x {context}"
        counts, contexts = [1] * decodes + [chunk], [context] * decodes + [chunk]
        self._step(TimedStep(what, statistics.median(taken), counts, contexts))

    def _step(self, step: TimedStep) -> None:
        what, seconds, counts, contexts = step
        rows, limit = sum(counts), self._costs.least_seconds(counts, contexts, self._limits)
        products = self._products.seconds(rows, len(counts))
        text = self._text
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        attention = None
        if not getattr(text, "kv_lora_rank", None):
            heads = text.num_attention_heads, text.num_key_value_heads
            attention = attention_seconds(
                text.num_hidden_layers, *heads, dim, counts, contexts, self._dtype, self._device
            )
        alone: dict[str, Any] = {"products_alone_ms": products * 1e3}
        if attention is not None:
            alone |= {"attention_alone_ms": attention * 1e3, "alone_ms": (products + attention) * 1e3}
        self._report.row(
            what,
            ms=seconds * 1e3,
            limit_ms=limit * 1e3,
            over_limit=seconds / limit,
            **alone,
            expected_ms=limit * 1e3 * expected_over_limit(what),
            tokens_per_s=rows / seconds,
        )

    def _memory(self) -> dict[str, Any]:
        weights = sum(file.stat().st_size for file in self._path.glob("*.safetensors"))
        held = {"kv_bytes": self._runner.kv_cache.nbytes, "weight_bytes": weights}
        if self._device.type == "cuda":
            held["peak_bytes"] = torch.cuda.max_memory_allocated(self._device)
        return held


def expected_over_limit(what: str) -> float:
    """Returns what 8 billion parameters in bfloat16 are expected to reach on an H200, as a multiple of the limit: see docs/gpu.md."""
    if not what.startswith("decode"):
        return 1 / 0.6
    batch = int(what.split()[1])
    return 1.4 if batch < 32 else 1.35 if batch <= 64 else 1.5


def computed_by(runner: TorchRunner) -> str:
    """Names the code path that was measured: a benchmark that fell back to another one must say so."""
    forward: Any = runner.forward
    replays = getattr(forward, "num_replays", None)
    inner = getattr(forward, "_forward", forward)
    parts = [type(getattr(inner, "attention", inner)).__name__]
    if replays is not None:
        parts.append(f"{len(forward.shapes)} recorded shapes")
    return ", ".join(parts)
