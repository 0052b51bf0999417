"""Makes drafts greedily with a small model that has the same tokenizer.

The draft model has its own KV cache, whose blocks have the model's block numbers: the owner of a block of the pool owns both. So the
scheduler keeps no second account, and the draft model is not told of preemptions, prefix hits, aborts or transfers. Instead it
identifies a block's content by a hash of all tokens up to the block's end. It begins a request after the blocks that hold the right
content, and reads the rest, some after each step. A prompt that another node computed is read here once more by the small model:
transferring its KV as well would take more of the link, and would bind prefill nodes, tiers and mirrors to a model that only
decoding needs.

Drafts cannot make an answer wrong. The model verifies each one, and a wrong one only costs time.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.model.batching import RequestRows, ScheduledTokens, build_batch
from tandem.engine.model.parts import Drafts
from tandem.engine.model.runner import Forward
from tandem.engine.model.staging import DeviceMark, on

_READING_S = 0.02  # the time after one step for reading prompts that are new to the draft model
_FIRST_PIECE, _MOST_READ = 64, 2048  # tokens
_FADES = 0.8


@dataclasses.dataclass(slots=True)
class _Progress:
    """How far the draft model has read one row's request."""

    tenancy: int
    num_read: int = 0  # tokens whose KV is in the row's blocks
    guessed: list[int] = dataclasses.field(default_factory=list)  # draft tokens that were read after these
    num_filed: int = 0  # how many leading blocks `_holds` has hashes of
    chain: int = 0  # the hash up to the last of these blocks


class DraftModel:
    """Only the step thread uses it. It reads the runner's block tables and tokens."""

    def __init__(
        self,
        forward: Forward,
        num_blocks: int,
        device: torch.device,
        *,
        table: int,
        block_size: int,
        max_model_len: int,
        draft_vocab: int,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`table` is the index of the model's block table that keeps every token."""
        self._forward = forward
        self._device = device
        self._table = table
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._draft_vocab, self._vocab_size = draft_vocab, vocab_size
        self._clock = clock
        self._progress: dict[int, _Progress] = {}
        # The hash of each block's content; 0: the block is not complete.
        self._holds: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._piece = float(_FIRST_PIECE)  # how many tokens are read in about _READING_S
        self.num_read = 0  # tokens of prompts and answers, without drafts
        self.guess_s = 0.0  # seconds per token of the last call's drafts, without reading

    def propose(self, requests: RequestRows, wanted: Mapping[str, int]) -> Drafts:
        """Makes drafts of up to `wanted` tokens. A request of which much is still unread gets none. Reads a piece of new prompts first."""
        with on(self._device), torch.inference_mode():
            lengths: dict[str, int] = {}
            for req_id, most in wanted.items():
                row = requests.row(req_id)
                # The last draft token is not read.
                room = min(self._max_model_len, requests.num_slots(row, self._table))
                length = min(most, room - int(requests.num_tokens[row]) + 1)
                if length > 0:
                    lengths[req_id] = length
                    self._find_progress(requests, row)
            self._read(requests, lengths)
            began = self._clock()
            drafts = self._guess(requests, lengths)
            self.guess_s = (self._clock() - began) / max(sum(map(len, drafts.values())), 1)
            return drafts

    def forget_requests(self) -> None:
        self._progress.clear()

    def _find_progress(self, requests: RequestRows, row: int) -> None:
        # The newest token is always read with the first draft token, whose logits it gives.
        known, tokens = int(requests.num_tokens[row]) - 1, requests.tokens[row]
        progress = self._progress.get(row)
        if progress is not None and progress.tenancy == requests.tenancies[row]:
            for token in progress.guessed:
                if progress.num_read >= known or tokens[progress.num_read] != token:
                    break
                progress.num_read += 1
            progress.guessed = []
            self._file(requests, row, progress)
            return
        progress = self._progress[row] = _Progress(int(requests.tenancies[row]))
        table = requests.tables[self._table][row]
        while (progress.num_filed + 1) * self._block_size <= known:
            chain = self._next_hash(requests, row, progress)
            if self._holds[table[progress.num_filed]] != chain:
                break
            progress.chain, progress.num_filed = chain, progress.num_filed + 1
        progress.num_read = progress.num_filed * self._block_size

    def _next_hash(self, requests: RequestRows, row: int, progress: _Progress) -> int:
        start = progress.num_filed * self._block_size
        return hash((progress.chain, requests.tokens[row, start : start + self._block_size].tobytes())) or 1

    def _file(self, requests: RequestRows, row: int, progress: _Progress) -> None:
        """Notes the hashes of blocks that are complete now."""
        table = requests.tables[self._table][row]
        while (progress.num_filed + 1) * self._block_size <= progress.num_read:
            progress.chain = self._next_hash(requests, row, progress)
            self._holds[table[progress.num_filed]] = progress.chain
            progress.num_filed += 1

    def _behind(self, requests: RequestRows, req_id: str) -> int:
        """How many tokens before the newest are unread."""
        row = requests.row(req_id)
        return int(requests.num_tokens[row]) - 1 - self._progress[row].num_read

    def _read(self, requests: RequestRows, lengths: Mapping[str, int]) -> None:
        """Reads a piece of the unread tokens. If only a few are unread, because the last draft was wrong, `_guess` reads them with the
        first draft token instead."""
        left = int(self._piece)
        counts: dict[str, int] = {}
        for req_id, length in lengths.items():
            behind = self._behind(requests, req_id)
            if behind > length and left > 0:
                counts[req_id] = min(behind, left)
                left -= counts[req_id]
        if not counts:
            return
        began = self._clock()
        self._forward_of(requests, counts, guesses=False)
        DeviceMark(self._device).wait()
        took, num_tokens = self._clock() - began, sum(counts.values())
        for req_id, count in counts.items():
            row = requests.row(req_id)
            progress = self._progress[row]
            progress.num_read += count
            self._file(requests, row, progress)
        self.num_read += num_tokens
        if num_tokens >= _FIRST_PIECE // 2 and took > 0:
            fitting = num_tokens * _READING_S / took
            self._piece = self._piece * _FADES + fitting * (1 - _FADES)
            self._piece = min(max(self._piece, _FIRST_PIECE // 2), _MOST_READ)

    def _guess(self, requests: RequestRows, lengths: Mapping[str, int]) -> Drafts:
        drafts: Drafts = {id: [] for id, most in lengths.items() if self._behind(requests, id) <= most}
        for place in range(max(map(lengths.__getitem__, drafts), default=0)):
            counts: dict[str, int] = {}
            for req_id, draft in drafts.items():
                if lengths[req_id] <= place:
                    continue
                counts[req_id] = self._behind(requests, req_id) + 1 if place == 0 else 1
                if place:
                    row = requests.row(req_id)
                    # The draft token is written after the known tokens, where the next real ones overwrite it.
                    requests.tokens[row, int(requests.num_tokens[row]) + place - 1] = draft[-1]
            for req_id, token in self._forward_of(requests, counts, guesses=True).items():
                row = requests.row(req_id)
                progress = self._progress[row]
                if place == 0:
                    self.num_read += counts[req_id]
                    progress.num_read = int(requests.num_tokens[row])
                    self._file(requests, row, progress)
                else:
                    progress.guessed.append(drafts[req_id][-1])
                drafts[req_id].append(token)
        return drafts

    def _forward_of(self, requests: RequestRows, counts: dict[str, int], *, guesses: bool) -> dict[str, int]:
        """Computes `counts` tokens after those that each request has read. With `guesses` returns the most likely next token of each."""
        seen = copy.copy(requests)  # the same rows, as far as this model has read them
        seen.tables, seen.num_token_tables = [requests.tables[self._table]], 1
        seen.num_computed = requests.num_computed.copy()
        # `build_batch` samples after a row whose tokens are all in the step. This number makes it sample nothing.
        seen.num_tokens = np.full_like(requests.num_tokens, np.iinfo(np.int32).max)
        for req_id, count in counts.items():
            row = requests.row(req_id)
            progress = self._progress[row]
            first = progress.num_read + len(progress.guessed)
            seen.num_computed[row] = first
            if guesses:
                seen.num_tokens[row] = first + count
            # A block that is written to is not complete until `_file` notes it.
            blocks = seen.tables[0][row, first // self._block_size : (first + count - 1) // self._block_size + 1]
            self._holds[blocks] = 0
        batch, scheduled = build_batch(seen, counts, {}, set(), self._block_size, self._device)
        if self._draft_vocab < self._vocab_size:
            batch.token_ids.clamp_(max=self._draft_vocab - 1)  # the model's vocabulary may have more padding
        logits = self._forward(batch, None)
        return self._tokens_of(scheduled, logits) if guesses else {}

    def _tokens_of(self, scheduled: ScheduledTokens, logits: torch.Tensor) -> dict[str, int]:
        best: list[int] = logits[:, : self._vocab_size].argmax(dim=-1).tolist()
        return {
            req_id: best[place]
            for req_id, place in zip(scheduled.req_ids, scheduled.first_sample.tolist(), strict=True)
        }
