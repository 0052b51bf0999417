"""Matrices that stay as a GGUF file stores them, in blocks of weights with a common scale. The library computes with them as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tandem.base.errors import ConfigurationError
from tandem.engine.model.content import BLOCKS_FILE
from tandem.kernels import library
from tandem.kernels.library import BlockRows


def write_blocks(folder: Path, matrices: Mapping[str, BlockRows]) -> None:
    kinds = json.dumps({name: rows.kind for name, rows in matrices.items()})
    save_file({name: rows.data for name, rows in matrices.items()}, folder / BLOCKS_FILE, {"kinds": kinds})


class StoredBlocks:
    """The blocks beside a checkpoint. The checkpoint is the model: blocks are used only where they are exactly its weights."""

    def __init__(self, folder: Path) -> None:
        self._file: Any = None
        self._kinds: dict[str, str] = {}
        path = folder / BLOCKS_FILE
        if not path.is_file():
            return
        try:
            self._file = safe_open(path, framework="np")
            self._kinds = json.loads(self._file.metadata()["kinds"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ConfigurationError(
                f"{path} cannot be read: {error}. Remove it: the model is served without it, with more memory"
            ) from error

    def of(self, name: str, weights: torch.Tensor) -> BlockRows | None:
        """The matrix of this name, if it has these weights, bit for bit."""
        kind = self._kinds.get(name)
        if kind not in library.BLOCKS:
            return None
        data = np.ascontiguousarray(self._file.get_tensor(name))
        if data.ndim != 2 or data.dtype != np.uint8:  # the library would read beyond what there is
            return None
        rows = BlockRows(data, kind)
        if rows.shape != tuple(weights.shape) or weights.dtype not in (torch.float32, torch.bfloat16):
            return None
        return rows if torch.equal(library.widen(rows, weights.dtype), weights) else None
