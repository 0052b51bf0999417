"""The parts of the GPU's benchmark: what each measures, and how long it may take."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks import gpu_handover
from benchmarks.gpu_handover import compare_pair, drive, prompts
from benchmarks.gpu_models import DRY_SHAPES, PARITY_SHAPE, SPEED_SHAPES, make_model
from benchmarks.gpu_parity import check_against_transformers, check_parity, check_same_bits
from benchmarks.gpu_profile import sampling_times
from benchmarks.gpu_report import Dtype, Report, note
from benchmarks.gpu_speed import DRY, QUICK, Sizes, SpeedBench
from benchmarks.lib.engines import load_engine


class Left(Exception):
    """A part that cannot run here, and why. It has not failed."""


class WrongAnswer(Exception):
    """The device computes something else than it should."""


class Setting(msgspec.Struct, frozen=True):
    device: str
    dtype: Dtype
    models: Path  # where models are made
    model: Path | None = None  # a model that is measured and compared with transformers, too
    kv_memory: int | None = None
    quick: bool = False

    @property
    def on_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def dry(self) -> bool:
        return self.on_device.type == "cpu"

    def made(self, name: str) -> Path:
        shape = (DRY_SHAPES if self.dry else SPEED_SHAPES)[name]
        return make_model(shape, self.models / name, self.on_device)


class Part(msgspec.Struct, frozen=True):
    run: Callable[[Setting, Report], None]
    deadline_s: float


def machine(setting: Setting, report: Report) -> None:
    device = setting.on_device
    versions = {"torch": str(torch.__version__), "python": sys.version.split()[0]}
    for name in ("transformers", "triton", "flashinfer-python", "nixl"):
        try:
            versions[name.replace("-", "_")] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name.replace("-", "_")] = "none"
    report.row("versions", **versions, cuda=str(torch.version.cuda))
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        asked = ["nvidia-smi", "--query-gpu=driver_version,memory.total,clocks.max.sm", "--format=csv,noheader"]
        told = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        report.row(
            "card", name=card.name, gib=card.total_memory / 2**30, capability=f"{card.major}.{card.minor}", smi=told
        )


def kernels(setting: Setting, report: Report) -> None:
    """All modules of FlashInfer that the other parts load, in one run of ninja."""
    if importlib.util.find_spec("flashinfer") is None:
        raise Left("flashinfer is not installed")
    if setting.dry:
        raise Left("a CPU has no use for them")
    from tandem.engine.model.cuda import prebuild

    device = setting.on_device
    major, minor = torch.cuda.get_device_capability(device)
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = f"{major}.{minor}{'a' if major >= 9 else ''}"
    hopper = major == 9
    groups: dict[str, dict[str, Any]] = {
        "bfloat16": {"head_dims": (64, 128)},
        "float16": {"head_dims": (64,), "dtype": torch.float16},
        "latents": {"head_dims": (), "latents": True},
        "fp8 weights": {"head_dims": (), "fp8_weights": hopper},
    }
    wanted = []
    for name, options in groups.items():
        try:
            wanted += prebuild.specs(**options)
        except Exception as error:  # sources that this package lacks cost only their own kernels
            report.row(name, left_out=f"{type(error).__name__}: {error}")
    began = time.monotonic()
    importlib.import_module("flashinfer.jit").build_jit_specs(wanted)
    report.row("compiled", modules=len(wanted), seconds=time.monotonic() - began)


def lanes(setting: Setting, report: Report) -> None:
    """What two processes move between their memory on this device, and by which of UCX's transports."""
    from tandem.kvtransfer.nixl_check import check

    if (reason := gpu_handover.missing()) is not None:
        raise Left(reason)
    found = check(device=setting.device)
    if found.error:
        raise RuntimeError(found.error)
    report.row(
        "a megabyte", gigabytes_per_s=found.gigabytes_per_s, lanes=", ".join(found.transports), version=found.version
    )


def transfer(setting: Setting, report: Report) -> None:
    """Handovers of many sizes between two processes, by the connector and by NIXL alone."""
    if setting.dry:
        raise Left("benchmarks.transfer needs no GPU")
    if (reason := gpu_handover.missing()) is not None:
        raise Left(reason)
    command = [sys.executable, "-u", "-m", "benchmarks.transfer", "--quick", "--device", setting.device]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.strip():
                report.row("told", words=line.strip())
    if child.returncode:
        raise RuntimeError(f"it ended with status {child.returncode}")


def parity(setting: Setting, report: Report) -> None:
    device, cpu = setting.on_device, torch.device("cpu")
    path = make_model(PARITY_SHAPE, setting.models / "parity", cpu)
    checks = [functools.partial(check, path, device) for check in (check_parity, check_same_bits)]
    for name in ("qwen3-8b", "experts", "latents"):
        shape = msgspec.structs.replace(DRY_SHAPES[name], dtype="float32", spread=PARITY_SHAPE.spread)
        made = make_model(shape, setting.models / "parity" / name, cpu)
        checks.append(functools.partial(check_against_transformers, made, device))
    if setting.model is not None:
        checks.append(functools.partial(check_against_transformers, setting.model, device))
    wrong: list[str] = []
    for check in checks:
        for one in check():
            report.row(one.what, holds=one.holds, said=one.said)
            wrong += [] if one.holds else [one.what]
    if wrong:
        raise WrongAnswer(", ".join(wrong))


def speed_of(name: str) -> Callable[[Setting, Report], None]:
    def speed(setting: Setting, report: Report) -> None:
        _measure(setting.made(name), setting, report)

    return speed


def given(setting: Setting, report: Report) -> None:
    if setting.model is None:
        raise Left("no --model was given")
    _measure(setting.model, setting, report)


def _measure(path: Path, setting: Setting, report: Report) -> None:
    sizes = DRY if setting.dry else QUICK if setting.quick else Sizes()
    SpeedBench(path, setting.dtype, setting.on_device, setting.kv_memory, sizes, report).run()


def sampling(setting: Setting, report: Report) -> None:
    """Choosing tokens from Llama 3's vocabulary. At best the logits are read once."""
    vocab, batches, repeats = (512, (1, 4), 2) if setting.dry else (128_256, (1, 64, 256), 20)
    dtype = getattr(torch, setting.dtype)
    for row in sampling_times(vocab, dtype, setting.on_device, batches, repeats):
        report.row(row.pop("what"), **row)


def pair(setting: Setting, report: Report) -> None:
    """A prefill and a decode engine in two processes on one card, compared with one engine."""
    if (reason := gpu_handover.missing()) is not None:
        raise Left(reason)
    small = setting.dry or setting.quick
    path = setting.made("tiny" if setting.quick else "8b")
    lengths, tokens = ((32, 96), 8) if small else ((512, 2048, 4096), 32)
    many, long, apart = (4, 64, 0.01) if small else (16, 1024, 0.04)
    config = msgspec.json.decode((path / "config.json").read_bytes())
    vocab, heads = int(config["vocab_size"]), int(config["num_key_value_heads"])
    singles = prompts(vocab, list(lengths), tokens, 0.0, "single")
    loaded = prompts(vocab, [long] * many, 2 * tokens, apart, "loaded")
    asks = [*singles, *loaded]
    dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    token_bytes = 2 * int(config["num_hidden_layers"]) * heads * dim * getattr(torch, setting.dtype).itemsize
    kv_bytes = max(64 << 20, token_bytes * sum(len(ask.prompt) + ask.tokens + 64 for ask in asks))
    native = not setting.dry
    plan = gpu_handover.plan_of(path, setting.dtype, setting.device, kv_bytes, native=native, asks=asks)
    engine, _ = load_engine(plan.model, plan.cache, plan.scheduling, native=native)
    alone: dict[str, gpu_handover.Told] = {}
    for ask in singles:
        alone |= drive(engine, [ask])
    load = drive(engine, loaded)
    del engine, _
    if not setting.dry:
        torch.cuda.empty_cache()
    note("two engines, and what goes from one to the other")
    same = compare_pair(plan, alone, load, singles, loaded, report)
    if same < len(singles):
        raise WrongAnswer(f"{len(singles) - same} of {len(singles)} answers are not those of one engine")


PARTS: dict[str, Part] = {
    "machine": Part(machine, 40),
    "kernels": Part(kernels, 300),
    "lanes": Part(lanes, 70),
    "transfer": Part(transfer, 75),
    "parity": Part(parity, 120),
    "tiny": Part(speed_of("tiny"), 90),
    "sampling": Part(sampling, 60),
    "8b": Part(speed_of("8b"), 300),
    "pair": Part(pair, 180),
    "qwen3-8b": Part(speed_of("qwen3-8b"), 180),
    "experts": Part(speed_of("experts"), 150),
    "fp8": Part(speed_of("fp8"), 180),
    "latents": Part(speed_of("latents"), 120),
    "1b": Part(speed_of("1b"), 120),
    "model": Part(given, 300),
}
# What fits into ten minutes on one card.
STAGES: dict[str, tuple[str, ...]] = {
    "1": ("machine", "kernels", "lanes", "parity", "tiny", "transfer"),
    "2": ("machine", "sampling", "8b", "pair"),
    "3": ("qwen3-8b", "experts", "fp8", "latents"),
}
