"""One step's work as the forward pass sees it: every request's tokens, flattened end to end, without padding.

Requests that compute one token (decodes) come first, so that rows [0, num_decodes) are theirs and one kernel
can take them together; longer chunks (prompts, and tokens with drafts after them) follow.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclasses.dataclass(frozen=True, slots=True)
class HostBatch:
    """What the host knows of a batch, in its memory; what it means stands at Batch. The tokens are not among it: the
    newest may be on the device alone."""

    positions: np.ndarray
    query_start: np.ndarray
    context_lens: np.ndarray
    slot_mapping: tuple[np.ndarray, ...]
    block_tables: tuple[np.ndarray, ...]
    logit_rows: np.ndarray | None = None  # None in a step of a fixed shape, which has a row for every token


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of R requests. Tensors lie on the model's device; every one is contiguous.

    Request r owns rows query_start[r] .. query_start[r+1]. Its last row is its token number context_lens[r] - 1,
    so its row i stands at position context_lens[r] - query_start[r+1] + i, and may attend to itself and every
    earlier position (in a sliding group: to the last `window` of them, itself included).

    Token at position p of request r, in group g, has its KV in block block_tables[g][r, p // block_size] at
    offset p % block_size. Columns beyond a request's blocks hold 0, the null block. In a sliding group, columns
    that lie wholly before the window of a request's first row may name blocks that are others' by now: they must
    not be read. KV of the batch's own tokens is written before it is read.

    A group of recurrent states has no slots: its table, the last, is [R, blocks of each request], and what lies there is the
    states after the token before the request's first row. For a request whose rows begin at position 0 it is nothing.

    Tensors may be views of buffers that the next step overwrites: nothing may keep them.
    """

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    query_start: torch.Tensor  # int32 [R + 1]
    context_lens: torch.Tensor  # int32 [R], this step's tokens included
    slot_mapping: tuple[
        torch.Tensor, ...
    ]  # per group that attends, int64 [T]: block id * block_size + offset, to write KV to
    block_tables: tuple[torch.Tensor, ...]  # per group, int32 [R, at least the longest request's blocks]
    logit_rows: torch.Tensor  # int64 [S], ascending: the rows whose logits are wanted; may be empty
    num_decodes: int  # the first requests, with one row each
    max_context_len: int
    # The same as query_start and context_lens, in host memory: reading them never waits for the device.
    host_query_start: np.ndarray  # int32 [R + 1]
    host_context_lens: np.ndarray  # int32 [R]
    # int64 [R]: the last so many rows of each request are guesses; None where no request has any
    host_num_drafts: np.ndarray | None = None
    # int64, ascending: the rows whose last hidden states are wanted, for vectors; None where no request wants any
    hidden_rows: torch.Tensor | None = None
    # int64 [T], the slot of each row's adapter, -1 for rows of the model itself; None where no row has one
    adapter_slots: torch.Tensor | None = None
    adapter_slots_used: int = 0  # only slots below this are among them
    # int64 [I]: rows that are no token's embedding, but a part of an image, or what a request brought; and what they are, [I, hidden
    # size], or a multiple of it: what further layers add (`VisionTower.width`)
    image_rows: torch.Tensor | None = None
    image_states: torch.Tensor | None = None
    # int64 [3, T]: time, row and column of each token, in place of `positions`, where a model counts images' so and some are here
    rope_positions: torch.Tensor | None = None
    # What the tensors were made from, for who plans on the host; a batch made by hand may lack it.
    host: HostBatch | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_requests(self) -> int:
        return self.context_lens.shape[0]
