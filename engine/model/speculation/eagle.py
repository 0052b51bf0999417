"""Makes drafts with an EAGLE head: one layer that reads the model's last hidden states, each together with the token after it.

The head's row at position i joins the model's hidden state there with the embedding of token i + 1. Its output stands for the model's
next hidden state, so the head continues from its own output where the model's is not known yet. As with a draft model
(`draft_model.py`), the head's KV is in blocks with the model's numbers, and a block's content is identified by a hash of the tokens
that it was computed from. These are one token more than the block has, because its last row reads the token after it. So a prefix hit
gives up its last block (`KVCacheManager.find_prefix`): the model computes that block again, and the head has all blocks before it.

There are no hidden states for tokens that the model did not compute on this node: a prompt that was received or loaded from a tier.
The head then begins at the next block's first token, as if the text began there.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.model.batching import RequestRows, ScheduledTokens, StepOnDevice, build_batch
from tandem.engine.model.parts import AskedRequest, Drafts, RunnerPart
from tandem.engine.model.runner import Batch, Forward
from tandem.engine.model.staging import on, to_device

if TYPE_CHECKING:
    from tandem.engine.model.observed import ObservedLayers

_MOST_WAITING = 256  # hidden states that are kept for a request which gets no drafts for a while

Join = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Makes the head's rows from token ids [N] and hidden states [N, hidden size]."""


@dataclasses.dataclass(slots=True)
class _Progress:
    """How far the head has read one row's request."""

    tenancy: int
    begin: int = 0  # the token that the head's text begins with; a block begins there
    num_read: int = 0
    waiting: torch.Tensor | None = None  # the model's hidden states from `num_read` on
    num_filed: int = 0  # how many leading blocks `_holds` has hashes of
    chain: int = 0  # the hash up to the last of these blocks

    @property
    def num_waiting(self) -> int:
        return self.waiting.shape[0] if self.waiting is not None else 0


class EagleHead(RunnerPart):
    """Only the step thread uses it. It reads the runner's block tables and tokens."""

    def __init__(
        self,
        forward: Forward,
        join: Join,
        num_blocks: int,
        device: torch.device,
        *,
        table: int,
        block_size: int,
        max_model_len: int,
        words: torch.Tensor | None = None,
        observed: ObservedLayers | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`table` is the index of the model's block table that keeps every token. `words` maps the head's tokens to the model's, if they
        differ. `observed` are the layers that an EAGLE-3 head reads instead of the last hidden states."""
        self._words, self._observed = words, observed
        self._forward = forward
        self._join = join
        self._device = device
        self._table = table
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._clock = clock
        self._progress: dict[int, _Progress] = {}
        self._most: dict[int, int] = {}  # the tokens that each row's request may get
        # The requests that the present pass makes drafts for; None between passes.
        self._wanted: npt.NDArray[np.bool_] | None = None
        # The hash of each block's content; 0: the block is not complete.
        self._holds: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self.num_read = 0  # rows of prompts and answers, without drafts
        self.num_cold = 0  # texts that the head reads only from a later block on
        self.guess_s = 0.0  # seconds per token of the last call's drafts

    def forget_requests(self) -> None:
        self._progress.clear()

    def add(self, row: int, asked: AskedRequest, requests: RequestRows) -> None:
        self._most[row] = asked.facts.sampling.max_tokens

    def prepare(self, batch: Batch, scheduled: ScheduledTokens, requests: RequestRows, started: StepOnDevice) -> Batch:
        self._wanted = self._wants_drafts(scheduled, requests)
        if self._wanted is None or self._observed is not None:
            return batch
        rows = np.flatnonzero(np.repeat(self._wanted, np.diff(scheduled.query_start)))
        return dataclasses.replace(batch, hidden_rows=to_device(rows, self._device))

    def _wants_drafts(self, scheduled: ScheduledTokens, requests: RequestRows) -> npt.NDArray[np.bool_] | None:
        """The requests that it makes drafts for: those that may get more than one token, so none on a prefill node. Returns None when there
        is none, and for a pass with a request for a vector, which reads the hidden states."""
        rows: list[int] = scheduled.rows.tolist()
        if not requests.silent.isdisjoint(rows):
            return None
        said = requests.num_tokens[scheduled.rows] - requests.num_prompt_tokens[scheduled.rows]
        found: npt.NDArray[np.bool_] = np.array([self._most[row] for row in rows]) > said + 1
        return found if found.any() else None

    def computed(
        self, batch: Batch, scheduled: ScheduledTokens, requests: RequestRows, started: StepOnDevice, forward: Forward
    ) -> None:
        """Takes the model's hidden states for all rows of the wanted requests. A prompt's rows are read at once, because the token after each
        is known; other rows wait for their next token."""
        wanted = self._wanted
        if wanted is None:
            return
        hidden = forward.hidden if self._observed is None else None
        reading: list[str] = []
        counts = np.diff(scheduled.query_start)
        ends = np.cumsum(counts * wanted)
        for index, (req_id, row) in enumerate(zip(scheduled.req_ids, scheduled.rows.tolist(), strict=True)):
            if not wanted[index]:
                continue
            count, end = int(counts[index]), int(ends[index])
            first = int(batch.host_context_lens[index]) - count
            start = int(scheduled.query_start[index])
            if self._observed is not None:
                self._keep(requests, row, first, self._observed.states(start, start + count).flatten(1))
            elif hidden is not None:
                self._keep(requests, row, first, hidden[end - count : end].clone())
            if not scheduled.samples[index]:
                reading.append(req_id)
        self._read(requests, reading)

    def propose(self, requests: RequestRows, wanted: Mapping[str, int]) -> Drafts:
        """Makes drafts of up to `wanted` tokens. A request whose hidden states are missing gets none."""
        began = self._clock()
        with on(self._device), torch.inference_mode():
            lengths: dict[str, int] = {}
            for req_id, most in wanted.items():
                row = requests.row(req_id)
                progress, known = self._progress.get(row), int(requests.num_tokens[row])
                if progress is None or progress.tenancy != requests.tenancies[row]:
                    continue
                last = progress.num_read + self._readable(requests, row, progress)
                # The row before the newest token has its hidden state, and the last draft token is not read.
                room = min(self._max_model_len, requests.num_slots(row, self._table))
                length = min(most, room - known + 2)
                if length > 0 and progress.num_read < last == known - 1:
                    lengths[req_id] = length
            drafts = self._guess(requests, lengths)
        self.guess_s = (self._clock() - began) / max(sum(map(len, drafts.values())), 1)
        return drafts

    def _keep(self, requests: RequestRows, row: int, first: int, hidden: torch.Tensor) -> None:
        """Appends hidden states from the token `first` on to those that wait."""
        progress = self._progress.get(row)
        if progress is None or progress.tenancy != requests.tenancies[row]:
            progress = self._progress[row] = self._begun(requests, row, first)
        elif first > progress.num_read + progress.num_waiting or progress.num_waiting > _MOST_WAITING:
            progress = self._progress[row] = self._cold(requests, row, first)
        kept = max(first - progress.num_read, 0)
        rows = hidden[max(progress.num_read - first, 0) :]
        if progress.waiting is not None and kept:
            rows = torch.cat([progress.waiting[:kept], rows])
        progress.waiting = rows

    def _begun(self, requests: RequestRows, row: int, first: int) -> _Progress:
        """Begins a request whose first `first` tokens have KV already. The head continues after them if its own blocks hold the same
        tokens, and otherwise begins at the next block."""
        progress = _Progress(int(requests.tenancies[row]))
        table = requests.tables[self._table][row]
        while (progress.num_filed + 1) * self._block_size <= first:
            chain = self._next_hash(requests, row, progress)
            if self._holds[table[progress.num_filed]] != chain:
                return self._cold(requests, row, first)
            progress.chain, progress.num_filed = chain, progress.num_filed + 1
        progress.num_read = progress.num_filed * self._block_size
        return progress if progress.num_read == first else self._cold(requests, row, first)

    def _cold(self, requests: RequestRows, row: int, first: int) -> _Progress:
        self.num_cold += 1
        begin = -(-first // self._block_size) * self._block_size
        return _Progress(int(requests.tenancies[row]), begin, begin)

    def _next_hash(self, requests: RequestRows, row: int, progress: _Progress) -> int:
        start = progress.num_filed * self._block_size
        tokens = requests.tokens[row, start : start + self._block_size + 1]
        return hash((progress.chain, tokens.tobytes())) or 1

    def _file(self, requests: RequestRows, row: int, progress: _Progress) -> None:
        """Notes the hashes of blocks that are complete now, for texts that the head has read from their first token on."""
        if progress.begin:
            return
        table = requests.tables[self._table][row]
        while (progress.num_filed + 1) * self._block_size <= progress.num_read:
            progress.chain = self._next_hash(requests, row, progress)
            self._holds[table[progress.num_filed]] = progress.chain
            progress.num_filed += 1

    def _readable(self, requests: RequestRows, row: int, progress: _Progress) -> int:
        """How many waiting rows have a known next token."""
        return max(min(progress.num_waiting, int(requests.num_tokens[row]) - 1 - progress.num_read), 0)

    def _take_rows(self, requests: RequestRows, row: int) -> torch.Tensor:
        """Takes the rows that can be read now, and counts them as read."""
        progress = self._progress[row]
        count, first = self._readable(requests, row, progress), progress.num_read
        tokens = torch.from_numpy(requests.tokens[row, first + 1 : first + count + 1].astype(np.int64))
        if progress.waiting is None or not count:
            return torch.empty(0)
        rows = self._join(tokens.to(self._device), progress.waiting[:count])
        progress.waiting = progress.waiting[count:]
        progress.num_read += count
        self.num_read += count
        return rows

    def _read(self, requests: RequestRows, req_ids: list[str]) -> None:
        given: dict[str, tuple[int, torch.Tensor]] = {}
        for req_id in req_ids:
            row = requests.row(req_id)
            first = self._progress[row].num_read
            rows = self._take_rows(requests, row)
            if rows.shape[0]:
                given[req_id] = first, rows
        if given:
            self._forward_of(requests, given, guesses=False)
            for req_id in given:
                row = requests.row(req_id)
                self._file(requests, row, self._progress[row])

    def _guess(self, requests: RequestRows, lengths: Mapping[str, int]) -> Drafts:
        drafts: Drafts = {req_id: [] for req_id in lengths}
        given: dict[str, tuple[int, torch.Tensor]] = {}
        for req_id in lengths:
            row = requests.row(req_id)
            given[req_id] = self._progress[row].num_read, self._take_rows(requests, row)
        for place in range(max(lengths.values(), default=0)):
            found = self._forward_of(requests, given, guesses=True)
            given = {}
            for req_id, (token, hidden) in found.items():
                drafts[req_id].append(token)
                row = requests.row(req_id)
                if place == 0:
                    self._file(requests, row, self._progress[row])
                if len(drafts[req_id]) < lengths[req_id]:
                    rows = self._join(torch.tensor([token], device=self._device), hidden[None])
                    given[req_id] = self._progress[row].num_read + place, rows
        return drafts

    def _forward_of(
        self, requests: RequestRows, given: Mapping[str, tuple[int, torch.Tensor]], *, guesses: bool
    ) -> dict[str, tuple[int, torch.Tensor]]:
        """Computes rows, given for each request as (first position, rows). With `guesses` returns the most likely token after each
        request's last row, and the hidden state."""
        seen = copy.copy(requests)  # the same rows, as far as the head has read their texts
        table = requests.tables[self._table].copy()
        seen.tables, seen.num_token_tables = [table], 1
        seen.num_computed = requests.num_computed.copy()
        # `build_batch` samples after a row whose tokens are all in the step. This number makes it sample nothing.
        seen.num_tokens = np.full_like(requests.num_tokens, np.iinfo(np.int32).max)
        for req_id, (first, rows) in given.items():
            row, count = requests.row(req_id), rows.shape[0]
            begin = self._progress[row].begin
            # A block that is written to is not complete until `_file` notes it.
            self._holds[table[row, first // self._block_size : (first + count - 1) // self._block_size + 1]] = 0
            if begin:
                table[row] = np.roll(table[row], -(begin // self._block_size))
            seen.num_computed[row] = first - begin
            if guesses:
                seen.num_tokens[row] = first - begin + count
        counts = {req_id: rows.shape[0] for req_id, (_, rows) in given.items()}
        batch, scheduled = build_batch(seen, counts, {}, set(), self._block_size, self._device)
        states = torch.cat([given[req_id][1] for req_id in scheduled.req_ids])
        batch = dataclasses.replace(
            batch,
            token_ids=torch.zeros_like(batch.token_ids),
            image_rows=torch.arange(states.shape[0], device=self._device),
            image_states=states,
            hidden_rows=batch.logit_rows if guesses else None,
        )
        logits = self._forward(batch, None)
        if not guesses:
            return {}
        likeliest, hidden = logits.argmax(dim=-1), self._forward.hidden.clone()
        best = (likeliest if self._words is None else self._words[likeliest]).tolist()
        return {
            req_id: (int(best[place]), hidden[place])
            for req_id, place in zip(scheduled.req_ids, scheduled.first_sample.tolist(), strict=True)
        }
