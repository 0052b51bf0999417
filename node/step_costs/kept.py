"""Keeps learnt costs in the cache folder, for the next start of a node of this model and role on such a machine."""

from __future__ import annotations

import hashlib
import platform
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from tandem.engine.model.runner import ModelInfo
from tandem.machine.digests import cache_folder, write_whole
from tandem.machine.resources import usable_cores
from tandem.node.config import NodeConfig
from tandem.wire.step_costs import TERMS, StepCosts

_CPUS = Path("/proc/cpuinfo")


def file_of(config: NodeConfig, info: ModelInfo) -> Path | None:
    """Returns the file of this model, kind of machine and role; None without a cache folder or an identity of the model."""
    folder = cache_folder()
    if folder is None or not info.content:
        return None
    model = config.engine.model
    what = (
        info.content, info.dtype, model.threads, len(config.cores) or usable_cores(), config.role.value,
        config.tensor_parallel, config.pipeline_parallel, config.context_parallel, _processor(info.device),
    )  # fmt: skip
    return folder / "step_costs" / f"{hashlib.sha256(repr(what).encode()).hexdigest()[:32]}.json"


def _processor(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in _CPUS.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line
    return platform.machine()


def read(file: Path | None) -> StepCosts | None:
    with suppress(OSError, msgspec.MsgspecError):
        if file is not None:
            costs = msgspec.json.decode(file.read_bytes(), type=StepCosts)
            return costs if len(costs.coefficients) == TERMS else None  # another version's
    return None


def write(file: Path, costs: StepCosts) -> None:
    """If it cannot be written, the next start learns from the beginning."""
    with suppress(OSError):
        write_whole(file, msgspec.json.encode(costs))
