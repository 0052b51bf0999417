"""Compiles FlashInfer's kernels ahead of time, for a container image. Otherwise each of its pods would compile them:

    FLASHINFER_CUDA_ARCH_LIST="8.0 9.0a" python -m tandem.engine.model.cuda.prebuild [HEAD_DIM ...] [--windows] [--softcaps] [--fp8]

It needs FlashInfer and CUDA's compiler, but no GPU. All modules are compiled in one run of ninja, a few minutes of a core each. Further
kernels that a model needs are compiled when it is first loaded.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

HEAD_DIMS = (64, 128)
_DEFAULT_ARCHITECTURES = "8.0 8.9 9.0a"


def specs(
    head_dims: Sequence[int] = HEAD_DIMS,
    *,
    dtype: torch.dtype = torch.bfloat16,
    windows: bool = False,
    softcaps: bool = False,
    fp8: bool = False,
    latents: bool = False,
    fp8_weights: bool = False,
) -> list[Any]:
    """The modules to compile, with their source written: attention by the kernels that run everywhere and, if the list of architectures
    asks for them, by Hopper's. They are those that FlashInfer itself loads: the list is what it asks for while nothing is loaded."""
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", _DEFAULT_ARCHITECTURES)
    hopper = "9.0" in os.environ["FLASHINFER_CUDA_ARCH_LIST"]
    load = importlib.import_module("flashinfer.prefill").get_batch_prefill_module.__wrapped__
    kept = (dtype, torch.float8_e4m3fn) if fp8 else (dtype,)
    choices = (False, True)
    with noted() as found:
        for dim, of_cache, window, softcap in itertools.product(
            head_dims, kept, choices[: 1 + windows], choices[: 1 + softcaps]
        ):
            for kernels in ("fa2", "fa3") if hopper and of_cache == dtype else ("fa2",):
                load(
                    kernels, dtype, of_cache, dtype, torch.int32, dim, dim, 0, window, softcap, False
                )  # fmt: skip
        if latents:
            jit = importlib.import_module("flashinfer.jit")
            element = dtype
            jit.gen_batch_mla_module("fa2", element, element, element, torch.int32, 512, 64, False).build_and_load()
        if fp8_weights and hopper:
            gemm = importlib.import_module("flashinfer.gemm.gemm_base")
            gemm.gen_fp8_blockscale_gemm_sm90_module().build_and_load()
    return found


@contextmanager
def noted() -> Iterator[list[Any]]:
    """Inside, a module that FlashInfer would compile and load is noted in the list instead, and its functions do nothing."""
    kinds = importlib.import_module("flashinfer.jit.core").JitSpec
    found: dict[str, Any] = {}
    listed: list[Any] = []

    def note(spec: Any) -> _Unloaded:
        if found.setdefault(spec.name, spec) is spec:
            listed.append(spec)
        return _Unloaded()

    before = kinds.build_and_load
    kinds.build_and_load = note
    try:
        yield listed
    finally:
        kinds.build_and_load = before


class _Unloaded:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: [0]  # a plan is a list of numbers


def main() -> int:
    parser = argparse.ArgumentParser(prog="prebuild", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("head_dims", nargs="*", type=int, metavar="HEAD_DIM", help="64 and 128 if none is given")
    parser.add_argument("--windows", action="store_true", help="also layers with a sliding window")
    parser.add_argument("--softcaps", action="store_true", help="also layers that cap their scores")
    parser.add_argument("--fp8", action="store_true", help="also for cache.dtype: fp8")
    parser.add_argument("--latents", action="store_true", help="also DeepSeek's latent attention")
    parser.add_argument("--fp8-weights", action="store_true", help="also products with FP8 in blocks, on Hopper")
    options = vars(parser.parse_args())
    wanted = specs(options.pop("head_dims") or HEAD_DIMS, **options)
    began = time.monotonic()
    importlib.import_module("flashinfer.jit").build_jit_specs(wanted)
    print(f"compiled {len(wanted)} modules of FlashInfer in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
