"""Writes prompts' hidden states to files, one for each request that asks for it, for training draft heads or probes.

A prompt's rows are copied to the host chunk by chunk, and a thread writes the file when the prompt is complete. A preempted request is
computed again from its first token, and its rows are collected again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tandem.base.errors import ConfigurationError, InternalError
from tandem.engine.model.batching import RequestRows, ScheduledTokens, StepOnDevice
from tandem.engine.model.hidden_states.experts import RoutedExperts
from tandem.engine.model.observed import ObservedLayers
from tandem.engine.model.parts import AskedRequest, RunnerPart
from tandem.engine.model.runner import Batch, Forward

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
# What may wait to be written, in host memory. Several steps of long prompts, so only a folder that is slower than the model fills it.
_MOST_BYTES = 2 << 30


@dataclasses.dataclass(slots=True)
class _Prompt:
    tokens: int = 0  # tokens whose states are collected
    pieces: list[torch.Tensor] = dataclasses.field(default_factory=list)
    experts: list[torch.Tensor] = dataclasses.field(default_factory=list)


class HiddenStates(RunnerPart):
    """Collects the hidden states of prompts whose requests ask for a file, and the experts that their tokens were routed to."""

    def __init__(self, observed: ObservedLayers, experts: RoutedExperts, folder: str) -> None:
        self._observed, self._experts = observed, experts
        self._files = StatesFiles(folder)
        self._names: dict[int, str] = {}  # the file for each request's hidden states, by row
        self._prompts: dict[int, _Prompt] = {}  # by the request's row

    @property
    def is_full(self) -> bool:
        return self._files.is_full

    def add(self, row: int, asked: AskedRequest, requests: RequestRows) -> None:
        if asked.facts.sampling.hidden_states is not None:
            self._names[row] = asked.facts.sampling.hidden_states

    def clear(self, row: int) -> None:
        self._names.pop(row, None)
        self._prompts.pop(row, None)

    def computed(
        self, batch: Batch, scheduled: ScheduledTokens, requests: RequestRows, started: StepOnDevice, forward: Forward
    ) -> None:
        if not self._names:
            return
        for index, row in enumerate(scheduled.rows.tolist()):
            if row not in self._names:
                continue
            begin, end = int(scheduled.query_start[index]), int(scheduled.query_start[index + 1])
            context, whole = int(batch.host_context_lens[index]), int(requests.num_prompt_tokens[row])
            first = context - (end - begin)
            if first == 0:
                self._prompts[row] = _Prompt()
            prompt = self._prompts.get(row)
            if prompt is None or first >= whole:
                continue  # another node has computed the prompt, or the file is written
            if first != prompt.tokens:
                raise InternalError(f"{prompt.tokens} tokens of a prompt are noted, and it goes on at {first}")
            prompt.tokens = min(context, whole)
            last = begin + prompt.tokens - first
            prompt.pieces.append(self._observed.rows(begin, last))
            if self._experts.layers:
                prompt.experts.append(self._experts.rows(begin, last))
            if prompt.tokens == whole:
                del self._prompts[row]
                self._files.write(self._names[row], self._tensors(requests.tokens[row, :whole], prompt))

    def _tensors(self, tokens: npt.NDArray[np.int32], prompt: _Prompt) -> dict[str, torch.Tensor]:
        tensors = {"token_ids": torch.from_numpy(tokens.astype("int64")), "hidden_states": torch.cat(prompt.pieces)}
        if prompt.experts:
            tensors["routed_experts"] = torch.cat(prompt.experts)
            tensors["routed_layers"] = torch.tensor(self._experts.layers)
        return tensors


class StatesFiles:
    """Writes files in a thread, for which no step waits. A file appears under its name only when it is complete. A file that cannot be
    written is logged, and does not fail its request; while the thread has as much to write as it may, new requests for files are
    refused (node.requests)."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            trial = self._folder / f".{os.getpid()}-{threading.get_ident()}"
            trial.touch()
            trial.unlink()
        except OSError as error:
            raise ConfigurationError(
                f"model.hidden_states_folder is {folder}, where this process cannot write: {error.strerror}"
            ) from error
        self._lock = threading.Lock()
        self._waiting = 0  # bytes
        self._writer = ThreadPoolExecutor(1, "hidden-states")

    @property
    def is_full(self) -> bool:
        return self._waiting >= _MOST_BYTES

    def write(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Queues a file, or drops it if as much as may wait is queued. `name` may begin with its owner's folder."""
        if self.is_full:
            logger.error(
                "the hidden states for %s are dropped: %s takes them more slowly than they come",
                name, self._folder,
            )  # fmt: skip
            return
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        with self._lock:
            self._waiting += num_bytes
        self._writer.submit(self._write, name, tensors, num_bytes)

    def _write(self, name: str, tensors: dict[str, torch.Tensor], num_bytes: int) -> None:
        whole = self._folder / (name + SUFFIX)
        # Another node may write to the same folder, so the temporary name contains this process's id.
        unfinished = whole.parent / f".{whole.name}-{os.getpid()}-{id(self)}"
        try:
            if whole.parent != self._folder:
                whole.parent.mkdir(exist_ok=True)
            save_file(tensors, unfinished)
            unfinished.replace(whole)
        except (OSError, SafetensorError) as error:
            logger.error("the hidden states for %s are not in %s: %s", name, self._folder, error)
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
        finally:
            with self._lock:
                self._waiting -= num_bytes
