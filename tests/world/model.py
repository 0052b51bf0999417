"""A model of the world: each position's KV is a function of its token and of the KV before it *as it lies in the blocks*, and the next
token is a function of all of it. So one foreign, stale or torn block changes the text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.model.runner import FinishedStep, LayerHooks, ModelInfo
from tandem.engine.scheduling.output import ModelOutput, NewRequestData, SchedulerOutput
from tests.world.adapters import WorldAdapters
from tests.world.images import ROW_SIZE, RULES, NodeImages

VOCABULARY = 50_000
LAYERS = 2
_MASK = (1 << 64) - 1
_SALT, _STEP, _FOLD = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed(value: int) -> int:
    value &= _MASK
    value ^= value >> 31
    value = value * _STEP & _MASK
    value ^= value >> 29
    value = value * _FOLD & _MASK
    return value ^ value >> 32


@functools.lru_cache(maxsize=64)
def _root(adapter: int = 0) -> int:
    """Where KV begins. `adapter`: what stands for its weights; 0: without one."""
    return mixed(_SALT + adapter)


def next_cell(before: int, token: int) -> int:
    return as_floats(mixed(before + (token + 1) * _SALT))


def as_floats(value: int) -> int:
    """A number whose halves are floats between 1 and 2, or -2 and -1, so that who compares KV sees by how much it differs."""
    return value & 0x807FFFFF807FFFFF | 0x3F8000003F800000


def token_of(last: int, folded: int) -> int:
    return mixed(last ^ folded) % VOCABULARY


def next_state(before: int, cell: int) -> int:
    return as_floats(mixed(before + cell))


def answer_to(prompt: list[int], num_tokens: int, adapter: int = 0, *, has_states: bool = False) -> list[int]:
    """The right answer: what a model without any cache, peer or fault would say."""
    cell, folded, state, tokens = _root(adapter), 0, 0, []
    known = list(prompt)
    at = 0
    while len(tokens) < num_tokens:
        for token in known[at:]:
            cell = next_cell(cell, token)
            folded = (folded + cell) & _MASK
            state = next_state(state, cell) if has_states else 0
        at = len(known)
        tokens.append(token_of(cell, folded + state))
        known.append(tokens[-1])
    return tokens


def _of_state(state: int, shape: tuple[int, ...]) -> np.ndarray:
    """A block with this state: each of its numbers is another one."""
    return np.uint64(state) + np.arange(np.prod(shape), dtype=np.uint64).reshape(shape)


class _Row:
    def __init__(self, new: NewRequestData) -> None:
        self.tokens, self.table = list(new.token_ids), list(new.block_ids[0])
        self.states = [block for table in new.block_ids[1:] for block in table]  # the block of its state
        self.lora, self.parts = new.facts.lora, new.image_parts


class WorldModel:
    """`took` is told how many seconds a step takes. As on a CPU, `start` computes the step."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        took: Callable[[float], None],
        adapters: WorldAdapters | None = None,
        images: NodeImages | None = None,
        *,
        has_states: bool = False,
    ) -> None:
        """`has_states`: other layers keep a recurrent state of all tokens, on which the next token depends, too."""
        # A token has one number for each layer, as key and once more as value
        self.kv_cache = torch.zeros(num_blocks, LAYERS, 2, 1, block_size, 2, dtype=torch.float32)
        self._cells: np.ndarray = self.kv_cache.numpy().view(np.uint64).reshape(num_blocks, LAYERS, 2, block_size)
        self._block_size = block_size
        self._took = took
        self._rows: dict[str, _Row] = {}
        # Called before the next prompt is computed; one of its tokens then comes out as this number
        self.goes_wrong: Callable[[list[int]], int] | None = None
        self.grammars = None
        self.adapters = adapters
        self._images = images
        self.states_wait = False
        groups = [KVCacheGroup(AttentionKind.FULL, block_size, tuple(range(LAYERS)))]
        if has_states:
            layers = tuple(range(LAYERS, 2 * LAYERS))
            groups.append(KVCacheGroup(AttentionKind.STATE, block_size, layers, blocks_per_request=1))
        self.info = ModelInfo(
            name="world",
            dtype="float32",
            device="cpu",
            vocab_size=VOCABULARY,
            max_model_len=max_model_len,
            eos_token_ids=frozenset(),
            num_layers=LAYERS * len(groups),
            num_kv_heads=1,
            head_dim=2,
            groups=tuple(groups),
            num_blocks=num_blocks,
            content="world",
            images=RULES if images is not None else None,
            image_row_size=ROW_SIZE,
        )

    @property
    def block_bytes(self) -> int:
        return self.kv_cache[0].nbytes

    @property
    def kv_in_memory(self) -> int:
        return self.kv_cache.nbytes

    def corrupt(self, block: int, offset: int, value: int) -> None:
        """Writes another token's KV there, whole and well-formed."""
        self._write(block, offset, as_floats(value))

    def forget_requests(self) -> None:
        self._rows.clear()
        if self._images is not None:
            self._images.forget_all()

    def start(self, step: SchedulerOutput, hooks: LayerHooks | None = None) -> FinishedStep:
        for request_id in step.finished_req_ids:
            self._rows.pop(request_id, None)
        computed: dict[str, int] = {}
        for new in step.new_reqs:
            self._rows[new.req_id] = _Row(new)
            computed[new.req_id] = new.num_computed_tokens
        cached = step.cached_reqs
        for request_id, before, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            computed[request_id] = before
            row = self._rows[request_id]
            if request_id in cached.resumed_req_ids:
                row.tokens = list(cached.resumed_token_ids[request_id])
                row.table = list(blocks[0]) if blocks is not None else []
                row.states = [block for table in (blocks or [[]])[1:] for block in table]
            elif blocks is not None:
                row.table += blocks[0]
                row.states += [block for table in blocks[1:] for block in table]
        if self._images is not None:
            self._images.take(step.encoder_inputs, step.forgotten_media)
        for source, target in step.state_copies:
            self._cells[target] = self._cells[source]
        plan = {id: (self._rows[id], computed[id], count) for id, count in step.num_scheduled_tokens.items()}
        self._took(0.01 + 0.001 * step.total_num_scheduled_tokens)
        return FinishedStep(self._compute(plan, hooks))

    def _compute(self, plan: dict[str, tuple[_Row, int, int]], hooks: LayerHooks | None) -> ModelOutput:
        if hooks is not None:
            for layer in range(LAYERS):
                hooks.wait_for_layer_load(layer)
        sampled: dict[str, list[int]] = {}
        adapters = self._in_slots({row.lora for row, _, _ in plan.values() if row.lora is not None})
        for request_id, (row, first, count) in plan.items():
            end = first + count
            table = np.array(row.table, dtype=np.int64)
            positions = np.arange(end)
            blocks, offsets = table[positions // self._block_size], positions % self._block_size
            there = self._cells[blocks[:first], :, :, offsets[:first]]  # [first, layers, 2]
            # Every part of a token has its own number; the key of layer 0 goes on
            cell = int(there[-1, 0, 0]) if first else _root(adapters[row.lora] if row.lora else 0)
            folded, state = self._folded(there), self._state(row, first)
            wrong_at = -1
            if self.goes_wrong is not None and count >= self._block_size:
                wrong_at, goes_wrong, self.goes_wrong = first + count // 3, self.goes_wrong, None
            for position in range(first, end):
                cell = next_cell(cell, self._read(row, position))
                if position == wrong_at:
                    cell = as_floats(goes_wrong(row.tokens))
                self._write(int(blocks[position]), int(offsets[position]), cell)
                folded = (folded + cell) & _MASK
                state = next_state(state, cell) if row.states else 0
            for block in row.states:
                self._cells[block] = _of_state(state, self._cells[block].shape)
            if end == len(row.tokens):
                token = token_of(cell, folded + state)
                row.tokens.append(token)
                sampled[request_id] = [token]
        if hooks is not None:
            for layer in range(LAYERS):
                hooks.save_kv_layer(layer)
        return ModelOutput(sampled)

    def _state(self, row: _Row, first: int) -> int:
        """The state after the tokens before this one, as it lies in its block; one whose parts disagree counts as another."""
        if not row.states or not first:
            return 0
        there = self._cells[row.states[0]]
        state = int(there[0, 0, 0])
        return state if (there == _of_state(state, there.shape)).all() else mixed(state)

    def _read(self, row: _Row, position: int) -> int:
        """The token at this position, or the row of an image that is in its place."""
        for part in row.parts:
            if self._images is not None and part.offset <= position < part.offset + part.length:
                return self._images.row(part, position)
        return row.tokens[position]

    def _in_slots(self, wanted: set[str]) -> dict[str, int]:
        return self.adapters.numbers(wanted) if self.adapters is not None and wanted else {}

    def _write(self, block: int, offset: int, cell: int) -> None:
        for layer in range(LAYERS):
            for part in (0, 1):
                self._cells[block, layer, part, offset] = (cell + 2 * layer + part) & _MASK

    @staticmethod
    def _folded(there: np.ndarray) -> int:
        """The sum of all cells; a token whose parts disagree counts as another."""
        if not len(there):
            return 0
        keys = there[:, 0, 0]
        parts = (np.arange(LAYERS, dtype=np.uint64)[:, None] * np.uint64(2) + np.arange(2, dtype=np.uint64))[None]
        torn = (there != keys[:, None, None] + parts).any(axis=(1, 2))
        total = int(keys.sum(dtype=np.uint64))
        return (total + int(torn.sum()) * _SALT) & _MASK
