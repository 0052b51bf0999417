"""Records steps once per shape and replays them, on CUDA as graphs. A decode step is hundreds of kernel launches, and launching takes
longer than computing.

A recording depends only on its input buffers (`DecodeInputs`), so any recorder can make it. A shape is a number of tokens and a
width of the block tables. Each token is computed as a request of its own, so decodes, short prompts and mixtures of them replay the
same recordings. Longer steps are not recorded, nor are steps whose tokens share long prefixes: each token would read its prefix again.

The ranks of a model must compute the same shapes, because they sum their results. So rank 0 decides for all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from tandem.base.errors import InternalError
from tandem.engine.model.cuda.decode_inputs import DecodeInputs, as_rows, bucket_of, table_width, token_buckets
from tandem.engine.model.cuda.fixed import FixedAttention, recordable
from tandem.engine.model.loaded import ForwardShape
from tandem.engine.model.runner import Batch, HostBatch, LayerHooks
from tandem.engine.model.shard import Shard

if TYPE_CHECKING:
    from tandem.engine.model.attention.interface import AttentionStep, PagedAttention

log = logging.getLogger(__name__)

Record = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]
"""Runs some work. Returns a function that runs it again, and the tensor that each run's result is in."""

# The most keys in a recording: where attention gathers keys and values, the recording keeps the memory for the copies.
_MOST_GATHERED_KEYS = 1 << 16
# The keys that a recorded step may read in each layer beyond those that its requests have. Reading so many takes about as long as
# launching an unrecorded step's kernels: 7 ms with 8 billion parameters. Both grow with the number of layers.
_MOST_READ_AGAIN = 1 << 17
# A model for which this many shapes were tried and none recorded counts as one that cannot be recorded.
_MOST_REFUSED = 3
# The memory of one recorded step: the graph's nodes, and a library's plan.
_BYTES_PER_GRAPH = 24 << 20
_WARM_UPS = 2
_SHORT_PROMPT = 512  # tokens


class CudaRecorder:
    """Records work as a CUDA graph. All graphs of one recorder share their memory, so only the latest replay's results are
    valid."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A stream on this device: torch's own would be on the current device and record nothing of this one. One stream for all
        # graphs, because graphs that share memory must be recorded on the same stream.
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
        # If the work cannot be recorded, torch leaves the recording's stream as the current one; the outer context restores the
        # old one. "thread_local" lets other threads, such as a connector's, use the device during the recording.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            result = work()
        return graph.replay, result


def recorded_tokens(shape: ForwardShape) -> int:
    """The longest step to record: all decodes that may run at once, and short prompts, whose time would go into launches."""
    return max(shape.max_requests, _SHORT_PROMPT)


def memory_of_graphs(max_tokens: int, vocab_size: int, element_bytes: int) -> int:
    """The device memory that recorded steps take besides the KV cache, in bytes."""
    return max_tokens * vocab_size * element_bytes + len(token_buckets(max_tokens)) * _BYTES_PER_GRAPH


class GraphForward(Protocol):
    """A forward pass that can be recorded: `compute` depends only on its input tensors and the attention step."""

    @property
    def attention(self) -> PagedAttention: ...
    @property
    def num_layers(self) -> int: ...

    @property
    def hidden(self) -> torch.Tensor: ...

    def __call__(self, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor: ...
    def compute(self, token_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep) -> torch.Tensor: ...


class _Recording:
    def __init__(
        self, inputs: DecodeInputs, fixed: FixedAttention, forward: GraphForward, record: Record, results: _Results
    ) -> None:
        self.inputs, self._fixed = inputs, fixed
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
    """One tensor for the logits of all recorded steps. Otherwise each recording would keep its own, half a gigabyte together, though
    only the latest step's logits are read."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._logits: torch.Tensor | None = None

    def keep(self, logits: torch.Tensor) -> torch.Tensor:
        if self._logits is None:
            # The warm-up runs come first, so no recording contains this allocation.
            self._logits = logits.new_empty(self._most, logits.shape[1])
        return self._logits[: logits.shape[0]].copy_(logits)


class DecodeGraphs:
    """A forward pass (engine.model.runner.Forward) that wraps another and replays steps of recorded shapes. Other steps, and shapes
    that cannot be recorded, are passed to the wrapped one."""

    def __init__(
        self,
        forward: GraphForward,
        record: Record,
        *,
        num_groups: int,
        block_size: int,
        max_tokens: int,
        device: torch.device,
        shard: Shard | None = None,
    ) -> None:
        self._forward = forward
        self._attention = recordable(forward.attention)
        self._record = record
        self._num_groups = num_groups
        self._block_size = block_size
        self._device = device
        self._shard = shard  # this rank's part of the model; None: the whole model
        self._buckets = token_buckets(max_tokens)
        self._results = _Results(max_tokens)
        self._recorded: dict[tuple[int, int], _Recording] = {}
        self._refused: set[tuple[int, int]] = set()  # shapes that cannot be recorded
        self.num_replays = 0

    def record_ahead(self, progress: Callable[[float], None]) -> None:
        """Records every number of tokens with the narrowest block tables, so that no request waits for it later. The largest comes
        first, because the others reuse its memory. Raises a torch.OutOfMemoryError when there is too little. With several ranks, a
        shape that one of them could not record is recorded on none, and no shape is recorded later."""
        columns = table_width(1) if self._attention.reads_tables else 0
        buckets = self._buckets[::-1]
        for done, size in enumerate(buckets, 1):
            if self._gave_up:
                break
            if self._fits(size, columns) and (size, columns) not in self._recorded:
                # An OutOfMemoryError is not caught here: better to fail at the start than when requests wait.
                self._record_shape(size, columns)
            progress(done / len(buckets))
        if self._shard is not None:
            self._keep_common(columns)

    def _keep_common(self, columns: int) -> None:
        """Forgets the shapes that not every rank has recorded. A collective."""
        assert self._shard is not None
        have = torch.tensor([(size, columns) in self._recorded for size in self._buckets], dtype=torch.int64)
        of_all = self._shard.collectives.gather(have.to(self._shard.device)).cpu()
        for size, everywhere in zip(self._buckets, of_all.amin(dim=0).tolist(), strict=True):
            if not everywhere:
                self._recorded.pop((size, columns), None)

    @property
    def _gave_up(self) -> bool:
        """Several shapes were tried and none could be recorded, so the model itself cannot be. Trying further would only take time."""
        return not self._recorded and len(self._refused) >= _MOST_REFUSED

    def __call__(self, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        recorded = self._told(batch) if batch.replayed is not None else self._recorded_for(batch)
        if recorded is None:
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

    def replays(self, batch: Batch) -> bool:
        """Whether the step will be replayed: rank 0 asks and tells the others."""
        return self._recorded_for(batch) is not None

    def _told(self, batch: Batch) -> _Recording | None:
        """What rank 0 decided."""
        if not batch.replayed:
            return None
        size, columns = self._shape_of(batch)
        if size is None or (size, columns) not in self._recorded:
            raise InternalError(f"rank 0 replays a step of {size} tokens, which this rank has not recorded")
        return self._recorded[size, columns]

    def _shape_of(self, batch: Batch) -> tuple[int | None, int]:
        columns = 0
        if self._attention.reads_tables:
            columns = table_width(-(-int(batch.host_context_lens.max()) // self._block_size))
        return bucket_of(self._buckets, batch.num_tokens), columns

    def _recorded_for(self, batch: Batch) -> _Recording | None:
        # A recorded step returns no hidden states, and takes only tokens: no adapters, images or rows.
        is_plain = (
            batch.hidden_rows is None
            and batch.adapter_slots is None
            and batch.image_rows is None
            and batch.rope_positions is None
        )
        if self._gave_up or not is_plain:
            return None
        size, columns = self._shape_of(batch)
        if size is None or not self._fits(size, columns) or _reads_again(batch.host) > _MOST_READ_AGAIN:
            return None
        return self._find(size, columns)

    def _fits(self, size: int, columns: int) -> bool:
        return size * columns * self._block_size <= _MOST_GATHERED_KEYS

    def _find(self, size: int, columns: int) -> _Recording | None:
        shape = size, columns
        if shape in self._recorded:
            return self._recorded[shape]
        if shape in self._refused or self._shard is not None:
            return None
        try:
            return self._record_shape(size, columns)
        except torch.OutOfMemoryError as error:
            # Earlier recordings stay, because they have their memory.
            self._refuse(shape, error)
            return None

    def _record_shape(self, size: int, columns: int) -> _Recording | None:
        """Records a shape; returns None if it cannot be recorded. Raises OutOfMemoryError, which says nothing about the shape."""
        inputs = DecodeInputs(size, columns, self._num_groups, self._block_size, self._device)
        try:
            fixed = self._attention.fixed(inputs)
            recorded = _Recording(inputs, fixed, self._forward, self._record, self._results)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # A model that reads its own intermediate results on the host cannot be recorded. It runs unrecorded.
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


def _reads_again(host: HostBatch) -> int:
    """How many keys of a layer the step reads more than once if each token is a request of its own. A decode reads none."""
    return int((host.positions + 1).sum()) - int(host.context_lens.sum(dtype=np.int64))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
