"""The engine on a GPU: whether it gives the CPU's tokens, and how near it is to the card's limits.

    python -m benchmarks.gpu [--shape 8b | --model DIR] [--dtype bfloat16] [--quick] [--json FILE] [--dry-run]

Each step is shown with what is expected of it (docs/gpu.md). Then follow: the time to choose tokens, where decode steps spend their time, a
prefill and a decode engine compared with one engine that does both, the parts of loading, and the peak of memory. Needs torch, transformers,
msgspec, xxhash and cbor2; the two engines also need nixl and pyzmq, and are left out without them. Needs no Ray and no network. Without a model
it makes one with random weights, which costs the same as a trained one. Uses FlashInfer if it is installed. `--dry-run` runs a tiny model
through the same steps on a CPU, as a test of the benchmark itself.

Exits with 2 without a GPU, and with 1 if the GPU's answers are not the CPU's.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks import gpu_handover
from benchmarks.engine_costs import MAX_BATCHED_TOKENS, Costs, Times, random_work, read_costs
from benchmarks.engine_tandem import run_tandem
from benchmarks.gpu_handover import Ask, Told
from benchmarks.gpu_models import PARITY_SHAPE, SPEED_SHAPES, make_model
from benchmarks.gpu_parity import check_parity
from benchmarks.gpu_parts import decode_parts, sampling_times
from benchmarks.machine import MachineLimits, measure_limits
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.loading import load_runner
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.scheduling.scheduler import Scheduler

PREFILLS = (128, 512, 2048, 8192)
DECODES = tuple((batch, context) for context in (128, 1024, 4096) for batch in (1, 8, 32, 128, 256))
# An estimate: thirty recordings with two warm-ups each.
EXPECTED_TO_RECORD_S = 6.0
QUICK_PREFILLS = (128, 512)
QUICK_DECODES = ((1, 128), (8, 128), (1, 1024))


def main() -> int:
    arguments = _arguments()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        print("There is no GPU here: torch finds no CUDA device. Nothing was measured.", file=sys.stderr)
        return 2
    device = torch.device(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        say("parity with the CPU")
        parities = check_parity(make_model(PARITY_SHAPE, Path(folder) / "parity", device), device)
        for parity in parities:
            say(f"  {parity.said}")
        path = Path(arguments.model) if arguments.model else None
        if path is None:
            shape = SPEED_SHAPES["tiny" if arguments.quick or device.type == "cpu" else arguments.shape]
            say(f"a model with random weights: {shape.num_parameters / 1e9:.2f} billion")
            path = make_model(shape, Path(folder) / "speed", device)
        figures, rows = measure(path, arguments, device)
    figures |= {"parity": msgspec.to_builtins(parities), "device": _said_of(device)}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n")
    print_table(figures, rows)
    if all(parity.holds for parity in parities):
        return 0
    print("The answers are not those of the CPU.", file=sys.stderr)
    return 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a local model folder; random weights without it")
    parser.add_argument("--shape", default="8b", choices=sorted(SPEED_SHAPES), help="of the random model")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the benchmark itself")
    parser.add_argument(
        "--dry-run", action="store_true", help="on the CPU, with a tiny model: tries the benchmark itself"
    )
    parser.add_argument("--kv-memory", type=int, help="bytes for the KV cache; most of what is free without")
    parser.add_argument("--quick", action="store_true", help="a tiny model, fewer sizes")
    parser.add_argument("--json", help="a file for the figures")
    arguments = parser.parse_args()
    if arguments.dry_run:
        arguments.device = "cpu"
    return arguments


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def measure(
    path: Path, arguments: argparse.Namespace, device: torch.device
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    quick = arguments.quick or device.type == "cpu"
    prefills, decodes = (QUICK_PREFILLS, QUICK_DECODES) if quick else (PREFILLS, DECODES)
    cache = CacheConfig(prefix_caching=False, memory_bytes=arguments.kv_memory)
    longest = max(*prefills, *(context + 64 for _, context in decodes)) + 320
    config = SchedulerConfig(
        max_num_seqs=max(batch for batch, _ in decodes),
        max_num_batched_tokens=MAX_BATCHED_TOKENS if quick else 4 * MAX_BATCHED_TOKENS,
        max_model_len=longest,
        step_target_ms=0,  # all requests of a batch must have begun before the first one ends
    )
    model = ModelConfig(path=str(path), dtype=arguments.dtype, device=arguments.device)
    on_device = device.type == "cuda"
    if on_device:
        torch.cuda.reset_peak_memory_stats(device)
    stages = Stages()
    # A dry run takes a GPU's code path as far as a CPU can.
    runner = load_runner(model, cache, config, stages.reached, native=on_device)
    stages.reached("measuring", 0.0)
    info = runner.info
    room = (info.num_blocks - 1) * cache.block_size // len(info.groups)
    decodes = tuple(shape for shape in decodes if shape[0] * (shape[1] + 320) <= room)
    work = random_work(
        str(path),
        info.dtype,
        info.vocab_size,
        info.max_model_len,
        prefills,
        decodes,
        repeats=2 if quick else 7,
        decode_steps=8 if quick else 32,
    )
    scheduler = Scheduler(config, cache, info.groups, info.num_blocks, info.max_model_len)
    engine = Engine(scheduler, runner, None, ahead=config.plans_ahead(info.device))
    times = run_tandem(engine, work, say)
    say("the card's limits")
    dtype = getattr(torch, info.dtype)
    limits = measure_limits(dtype, device, torch.get_num_threads(), roughly=arguments.dry_run)
    kv_bytes = runner.kv_cache[0].numel() * runner.kv_cache.element_size() // cache.block_size
    rows = compare(times, limits, read_costs(path, dtype, kv_bytes * len(info.groups)))
    say("choosing tokens")
    batches = (1, 4) if quick else (1, 64, 256)
    sampling = sampling_times(info.vocab_size, dtype, device, batches, repeats=3 if quick else 20)
    say("where decode steps spend their time")
    parts = decode_parts(engine, info.vocab_size, device, batches, steps=4 if quick else 20)
    for row in sampling:
        row["at_best_ms"] = 1e3 * row["logits_bytes"] / limits.read_bytes
    cache_bytes = runner.kv_cache.nbytes
    peak = torch.cuda.max_memory_allocated(device) if on_device else None
    described = {
        "model": info.name,
        "dtype": info.dtype,
        "computed_by": computed_by(runner),
    }
    answers = Answers.by(engine, info.vocab_size, quick=quick)
    del engine, scheduler, runner
    gc.collect()
    if on_device:
        torch.cuda.empty_cache()
    say("two engines, and what goes from one to the other")
    pair = answers.by_two(path, arguments, kv_bytes * len(info.groups), native=on_device)
    figures = {
        **described,
        "limits": msgspec.to_builtins(limits),
        "rows": rows,
        "sampling": sampling,
        "parts": parts,
        "pair": pair,
        "seconds_to_load": stages.seconds,
        "expected_seconds_to_record": EXPECTED_TO_RECORD_S,
        "peak_memory_bytes": peak,
        "cache_bytes": cache_bytes,
        "weight_bytes": weight_bytes(path),
    }
    return figures, rows


def weight_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


class Answers:
    """The answers of one engine, then those of two."""

    def __init__(
        self, singles: list[Ask], loaded: list[Ask], alone: dict[str, Told], load: dict[str, Told]
    ) -> None:
        self._singles, self._loaded, self._alone, self._load = singles, loaded, alone, load

    @classmethod
    def by(cls, engine: Engine, vocab: int, *, quick: bool) -> Answers:
        lengths, tokens = ((32, 96), 8) if quick else ((512, 2048, 4096), 32)
        singles = gpu_handover.prompts(vocab, list(lengths), tokens, 0.0, "single")
        many, long, apart = (4, 64, 0.01) if quick else (16, 1024, 0.04)
        loaded = gpu_handover.prompts(vocab, [long] * many, 2 * tokens, apart, "loaded")
        alone: dict[str, Told] = {}
        for ask in singles:
            alone |= gpu_handover.one_engine(engine, [ask])
        return cls(singles, loaded, alone, gpu_handover.one_engine(engine, loaded))

    def by_two(
        self, path: Path, arguments: argparse.Namespace, token_bytes: int, *, native: bool
    ) -> dict[str, Any]:
        reason = gpu_handover.missing()
        if reason is not None:
            return {"left_out": reason}
        asks = [*self._singles, *self._loaded]
        tokens = sum(len(ask.prompt) + ask.tokens + 64 for ask in asks)
        plan = gpu_handover.plan_of(
            path,
            arguments.dtype,
            arguments.device,
            max(64 << 20, tokens * token_bytes),
            native=native,
            asks=asks,
        )
        return gpu_handover.compare_pair(plan, self._alone, self._load, self._singles, self._loaded)


def computed_by(runner: TorchRunner) -> str:
    """Names the code path that was measured: a benchmark that fell back to another one must say so."""
    forward: Any = runner.forward
    replays = getattr(forward, "num_replays", None)
    inner = getattr(forward, "_forward", forward)
    parts = [type(getattr(inner, "attention", inner)).__name__]
    if replays is not None:
        parts.append(f"{len(forward.shapes)} recorded shapes, {replays} replays")
    return ", ".join(parts)


class Stages:
    """How long each part of loading took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._what, self._since = "", time.perf_counter()

    def reached(self, what: str, share: float) -> None:
        now = time.perf_counter()
        if self._what:
            self.seconds[self._what] = self.seconds.get(self._what, 0.0) + now - self._since
        if what != self._what:
            say(f"  {what}")
        self._what, self._since = what, now


def expected_over_limit(what: str) -> float:
    """Returns what 8 billion parameters in bfloat16 are expected to reach on an H200, as a multiple of the limit: see docs/gpu.md."""
    if what.startswith("prefill"):
        return 1 / 0.6
    batch = int(what.split()[1])
    return 1.4 if batch < 32 else 1.35 if batch <= 64 else 1.5


def compare(times: Times, limits: MachineLimits, costs: Costs) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def row(what: str, tokens: int, seconds: float, flops: int, read: int) -> None:
        limit = max(flops / limits.gemm_flops, read / limits.read_bytes)
        rows.append(
            {
                "what": what,
                "ms": seconds * 1e3,
                "tokens_per_s": tokens / seconds,
                "limit_ms": limit * 1e3,
                "over_limit": seconds / limit,
                "expected_ms": limit * 1e3 * expected_over_limit(what),
                "flop_utilisation": flops / seconds / limits.gemm_flops,
                "bandwidth_utilisation": read / seconds / limits.read_bytes,
            }
        )

    for length, seconds in times.prefill.items():
        row(f"prefill {length}", length, seconds, costs.prefill_flops(length), costs.decode_bytes(1, length))
    for (batch, context), seconds in times.decode.items():
        flops, read = costs.decode_flops(batch, context), costs.decode_bytes(batch, context)
        row(f"decode {batch} x {context}", batch, seconds, flops, read)
    return rows


def print_table(figures: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    limits = figures["limits"]
    print(f"{figures['device']}; {figures['model']}, {figures['dtype']}, {figures['computed_by']}")
    print(f"limits: {limits['gemm_flops'] / 1e12:.1f} TFLOP/s, {limits['read_bytes'] / 1e9:.0f} GB/s")
    heads = ("step", "ms", "expected", "tokens/s", "limit ms", "x limit", "FLOPs", "bandwidth")
    print("".join(f"{head:>{18 if index == 0 else 12}}" for index, head in enumerate(heads)))
    for row in rows:
        cells = (
            f"{row['ms']:.2f}",
            f"{row['expected_ms']:.2f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['limit_ms']:.2f}",
            f"{row['over_limit']:.2f}",
            f"{row['flop_utilisation']:.0%}",
            f"{row['bandwidth_utilisation']:.0%}",
        )
        print(f"{row['what']:>18}" + "".join(f"{cell:>12}" for cell in cells))

    print(
        "choosing tokens, ms (at best): "
        + "; ".join(f"{row['what']} {row['ms']:.2f} ({row['at_best_ms']:.2f})" for row in figures["sampling"])
    )
    for row in figures["parts"]:
        print(
            f"{row['what']}: {row['wall_ms']:.2f} ms a step, of which kernels {row['kernels_ms']:.2f} "
            f"({row['kernels']:.0f} of them, expected: as long as the step); the host is busy for {row['host_ms']:.2f}, expected: less"
        )
    print_pair(figures["pair"])
    loading = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in figures["seconds_to_load"].items())
    peak = figures["peak_memory_bytes"]
    print(
        f"loading: {loading}; recording is expected to take {figures['expected_seconds_to_record']:g} s at most"
    )
    held = ", ".join(
        f"{what} {figures[name] / 2**30:.1f}"
        for what, name in (("weights", "weight_bytes"), ("KV", "cache_bytes"))
    )
    print(f"GiB: {held}" + (f", at most {peak / 2**30:.1f} in all" if peak is not None else ""))


def print_pair(pair: dict[str, Any]) -> None:
    if "left_out" in pair:
        print(f"two engines: left out ({pair['left_out']})")
        return
    print(
        f"two engines: {pair['same_answers']} of {pair['answers']} answers are those of one engine, token for token"
    )
    for row in pair["handovers"]:
        print(
            f"  handover of {row['tokens']} tokens: {row['ms']:.2f} ms after the last chunk, expected {row['expected_ms']:g}"
        )
    for who in ("one_engine", "two"):
        row = pair[who]
        print(
            f"  {who.replace('_', ' ')}: first token {row['ttft_ms_p50']:.1f} ms, between tokens {row['gap_ms_p50']:.2f} "
            f"(p99 {row['gap_ms_p99']:.2f}), {row['tokens_per_s']:.0f} tokens/s"
        )


def _said_of(device: torch.device) -> str:
    if device.type != "cuda":
        return f"cpu, torch {torch.__version__}"
    card = torch.cuda.get_device_properties(device)
    return f"{card.name}, {card.total_memory / 2**30:.0f} GiB, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main())
