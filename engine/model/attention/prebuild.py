"""Compiles FlashInfer's kernels ahead of time, for a container image. Otherwise each of its pods would compile them:

    FLASHINFER_CUDA_ARCH_LIST="8.0 9.0a" python -m tandem.engine.model.attention.prebuild [HEAD_DIM ...]

It needs FlashInfer and CUDA's compiler, but no GPU. Further kernels that a model needs are compiled when it is first loaded.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

HEAD_DIMS = (64, 128)
_DEFAULT_ARCHITECTURES = "8.0 8.9 9.0a"


def specs(head_dims: Sequence[int] = HEAD_DIMS) -> list[Any]:
    """The kernels to compile, with their source written: full attention in bfloat16, by the kernels that run everywhere and, if the
    list of architectures asks for them, by Hopper's."""
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", _DEFAULT_ARCHITECTURES)
    modules = importlib.import_module("flashinfer.jit.attention.modules")
    hopper = "9.0" in os.environ["FLASHINFER_CUDA_ARCH_LIST"]
    element = torch.bfloat16
    return [
        modules.gen_batch_prefill_module(
            kernels, element, element, element, torch.int32, dim, dim, 0, False, False, False
        )
        for kernels in (("fa2", "fa3") if hopper else ("fa2",))
        for dim in head_dims
    ]


def main() -> int:
    wanted = specs([int(word) for word in sys.argv[1:]] or HEAD_DIMS)
    importlib.import_module("flashinfer.jit").build_jit_specs(wanted)
    print(f"compiled {len(wanted)} modules of FlashInfer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
