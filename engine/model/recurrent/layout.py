"""The layout of a request's recurrent states in its blocks of the KV cache.

States are kept as bytes, so a pool of bfloat16 keeps a float32 state unchanged. A request's blocks, in the order of its table, are one
run of bytes with one layer's states after the other. A state may begin in one block and end in a later one.
"""

from __future__ import annotations

import math

import msgspec
import torch

from tandem.kvtransfer.base import longest_word

_ALIGNED = 64  # bytes
CONV, RECURRENT, MATRIX = "conv", "recurrent", "matrix"  # kinds of state

StateKey = tuple[int, str, int]
"""(layer, kind of state, its number in the layer)"""


class State(msgspec.Struct, frozen=True):
    """One state of a request, with the shape that its module keeps."""

    layer: int
    kind: str
    number: int
    shape: tuple[int, ...]  # without the batch dimension
    dtype: torch.dtype

    @property
    def key(self) -> StateKey:
        return self.layer, self.kind, self.number

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StateLayout(msgspec.Struct, frozen=True):
    states: tuple[State, ...]
    begins: tuple[int, ...]  # where each begins, in bytes
    num_bytes: int

    @classmethod
    def of(cls, states: tuple[State, ...]) -> StateLayout:
        begins, end = [], 0
        for state in states:
            begins.append(end)
            end += -(-state.num_bytes // _ALIGNED) * _ALIGNED
        return cls(states, tuple(begins), end)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({state.layer for state in self.states}))

    def blocks_for(self, block_bytes: int) -> int:
        return -(-self.num_bytes // block_bytes)


class LayerStates:
    """The states in the KV cache tensor."""

    def __init__(self, tensor: torch.Tensor, layout: StateLayout) -> None:
        self._blocks = tensor.view(tensor.shape[0], -1).view(torch.uint8)  # [blocks, bytes]
        # The same memory in larger elements: a write's time grows with their number.
        self._words = self._blocks.view(longest_word(self._blocks.shape[1]))
        self._begin = {state.key: begin for state, begin in zip(layout.states, layout.begins, strict=True)}

    def load(self, states: tuple[State, ...], table: torch.Tensor) -> dict[StateKey, torch.Tensor]:
        """Returns copies of the states, [requests, *shape] each. `table` is [requests, blocks per request]."""
        first, last, base = self._span(states)
        run = self._read(table[:, first:last])
        return {
            state.key: run[:, begin : begin + state.num_bytes].contiguous().view(state.dtype).view(-1, *state.shape)
            for state in states
            for begin in (self._begin[state.key] - base,)
        }

    def save(self, states: tuple[State, ...], table: torch.Tensor, values: dict[StateKey, torch.Tensor]) -> None:
        """Writes the states. Whole blocks are written, so the rest of the first and the last block is read before."""
        first, last, base = self._span(states)
        blocks = table[:, first:last]
        run = self._read(blocks)
        for state in states:
            begin = self._begin[state.key] - base
            run[:, begin : begin + state.num_bytes] = (
                values[state.key].to(state.dtype).contiguous().view(len(table), -1).view(torch.uint8)
            )
        self._words[blocks] = run.view(*blocks.shape, -1).view(self._words.dtype)

    def _read(self, blocks: torch.Tensor) -> torch.Tensor:
        """Each request's blocks, one after the other, as bytes."""
        return self._blocks.index_select(0, blocks.flatten()).view(len(blocks), -1)

    def _span(self, states: tuple[State, ...]) -> tuple[int, int, int]:
        """The blocks of a table that these states are in, and the byte where the first state begins."""
        size = self._blocks.shape[1]
        first = min(self._begin[state.key] for state in states) // size
        end = max(self._begin[state.key] + state.num_bytes for state in states)
        return first, -(-end // size), first * size
