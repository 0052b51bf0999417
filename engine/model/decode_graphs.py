"""Steps that are recorded once per shape and replayed: a decode step is hundreds of launches, and launching takes longer
than computing.

What is recorded knows nothing but its input buffers (`DecodeInputs`), so it does not matter what records: on CUDA
a graph does. A shape is a number of tokens. Each is computed as a request of its own, so decodes, drafts, short prompts
and any mixture of them replay the same recordings; longer steps are computed as they come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tandem.engine.model.attention.interface import AttentionStep, FixedAttention, PagedAttention
from tandem.engine.model.decode_inputs import DecodeInputs, as_rows, bucket_of, table_width, token_buckets
from tandem.engine.model.runner import Batch, HostBatch, LayerHooks

log = logging.getLogger(__name__)

Record = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]
"""Runs some work and returns how to run it again, and the tensor that its result will be in each time."""

# Where attention copies keys and values together, a recording keeps the memory for that: so many at most.
_MOST_GATHERED_KEYS = 1 << 16
# So many shapes are tried before a model of which none was recorded counts as one that cannot be.
_MOST_REFUSED = 3
# The memory of one recorded step: its nodes, and a library's plan for it.
_BYTES_PER_GRAPH = 24 << 20
_WARM_UPS = 2


class CudaRecorder:
    """Records work as a CUDA graph. All graphs of one recorder share their memory: only the latest replay's
    results are whole."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # On this device, and one for all: torch's own would be on whichever device is current, and record nothing of
        # this one's; and graphs that share memory are to be recorded on the same stream.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        current = torch.cuda.current_stream(self._device)
        # Libraries choose kernels and allocate on their first calls, which must not be recorded.
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Where work cannot be recorded, torch leaves the recording's stream the current one. The outer stream is what
        # comes back then. Other threads of this process may use the device meanwhile: a connector's, for one.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            result = work()
        return graph.replay, result


def memory_of_graphs(max_tokens: int, vocab_size: int, element_bytes: int) -> int:
    """What recorded steps take beside the KV cache."""
    return max_tokens * vocab_size * element_bytes + len(token_buckets(max_tokens)) * _BYTES_PER_GRAPH


class GraphForward(Protocol):
    """The forward pass between its inputs and its attention."""

    @property
    def attention(self) -> PagedAttention: ...
    @property
    def num_layers(self) -> int: ...

    @property
    def hidden(self) -> torch.Tensor: ...

    def __call__(self, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor: ...
    def compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor: ...


class _Recording:
    def __init__(
        self, inputs: DecodeInputs, forward: GraphForward, record: Record, results: _Results
    ) -> None:
        self.inputs = inputs
        self._fixed: FixedAttention = forward.attention.fixed(inputs)
        self._fixed.prepare(None)
        self._replay, self._logits = record(
            lambda: results.keep(forward.compute(inputs.token_ids, inputs.positions, self._fixed.begin()))
        )

    def run(self, rows: HostBatch, token_ids: torch.Tensor) -> torch.Tensor:
        self.inputs.load(rows, token_ids)
        self._fixed.prepare(rows)
        self._replay()
        return self._logits


class _Results:
    """One tensor for the logits of all recorded steps. Each would hold its own for ever, half a gigabyte together; only
    those of the latest are asked for."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._logits: torch.Tensor | None = None

    def keep(self, logits: torch.Tensor) -> torch.Tensor:
        if self._logits is None:
            # Warming up comes before recording, so this is no part of a recording.
            self._logits = logits.new_empty(self._most, logits.shape[1])
        return self._logits[: logits.shape[0]].copy_(logits)


class DecodeGraphs:
    """A forward pass (engine.model.runner.Forward) in front of another. A shape that cannot be recorded is computed as it
    comes; the others are replayed all the same."""

    def __init__(
        self,
        forward: GraphForward,
        record: Record,
        *,
        num_groups: int,
        block_size: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._record = record
        self._num_groups = num_groups
        self._block_size = block_size
        self._device = device
        self._buckets = token_buckets(max_tokens)
        self._results = _Results(max_tokens)
        self._recorded: dict[tuple[int, int], _Recording] = {}
        self._refused: set[tuple[int, int]] = (
            set()
        )  # shapes that cannot be recorded, and are computed as they come
        self.num_replays = 0

    def record_ahead(self, progress: Callable[[float], None]) -> None:
        """Records every number of tokens, with the narrowest tables, so that no request waits for it later. The largest
        first: the memory that it needs serves the others. Raises torch.OutOfMemoryError where there is too little."""
        columns = table_width(1) if self._forward.attention.reads_tables else 0
        buckets = self._buckets[::-1]
        for done, size in enumerate(buckets, 1):
            if self._gave_up:
                return
            if self._fits(size, columns) and (size, columns) not in self._recorded:
                # The cache leaves too little memory: better known now than when requests wait.
                self._record_shape(size, columns)
            progress(done / len(buckets))

    @property
    def _gave_up(self) -> bool:
        """Nothing was recorded, and trying took time more than once: it is the model that cannot be."""
        return not self._recorded and len(self._refused) >= _MOST_REFUSED

    def __call__(self, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        recorded = self._recorded_for(batch)
        if recorded is None or batch.host is None:
            return self._forward(batch, hooks)
        layers = range(self._forward.num_layers) if hooks is not None else ()
        for layer in layers:
            hooks.wait_for_layer_load(layer)  # type: ignore[union-attr]
        logits = recorded.run(as_rows(batch.host), batch.token_ids)[: batch.num_tokens]
        self.num_replays += 1
        for layer in layers:
            hooks.save_kv_layer(layer)  # type: ignore[union-attr]
        return logits if batch.logit_rows.shape[0] == batch.num_tokens else logits[batch.logit_rows]

    @property
    def hidden(self) -> torch.Tensor:
        return self._forward.hidden

    def _recorded_for(self, batch: Batch) -> _Recording | None:
        # A recorded step leaves logits, and no hidden states; and it was recorded without adapters, of tokens alone.
        is_plain = (
            batch.hidden_rows is None
            and batch.adapter_slots is None
            and batch.image_rows is None
            and batch.rope_positions is None
        )
        if self._gave_up or batch.host is None or not is_plain:
            return None
        size = bucket_of(self._buckets, batch.num_tokens)
        columns = 0
        if self._forward.attention.reads_tables:
            columns = table_width(-(-batch.max_context_len // self._block_size))
        if size is None or not self._fits(size, columns):
            return None
        return self._find(size, columns)

    def _fits(self, size: int, columns: int) -> bool:
        return size * columns * self._block_size <= _MOST_GATHERED_KEYS

    def _find(self, size: int, columns: int) -> _Recording | None:
        shape = size, columns
        if shape in self._recorded:
            return self._recorded[shape]
        if shape in self._refused:
            return None
        try:
            return self._record_shape(size, columns)
        except torch.OutOfMemoryError as error:
            # What is recorded stays: it holds its memory already.
            self._refuse(shape, error)
            return None

    def _record_shape(self, size: int, columns: int) -> _Recording | None:
        """None where this shape cannot be recorded. Raises OutOfMemoryError: that says nothing about the shape."""
        inputs = DecodeInputs(size, columns, self._num_groups, self._block_size, self._device)
        try:
            recorded = _Recording(inputs, self._forward, self._record, self._results)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # A model that looks at its own intermediate results cannot be recorded; it runs all the same.
            self._refuse((size, columns), error)
            return None
        self._recorded[size, columns] = recorded
        return recorded

    def _refuse(self, shape: tuple[int, int], error: Exception) -> None:
        self._refused.add(shape)
        log.warning("steps of %d tokens are not recorded, which is slower: %s", shape[0], _first_line(error))

    @property
    def shapes(self) -> Sequence[tuple[int, int]]:
        """Recorded so far: (tokens, columns)."""
        return list(self._recorded)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
