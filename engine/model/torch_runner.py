"""The runner: keeps what it knows of requests, computes steps, samples, and proposes drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from engine.model.batch import Batch
from engine.model.batching import Scheduled, build_batch
from engine.model.forward import Forward
from engine.model.ngram import propose
from engine.model.passes import cut_for_logits, hooks_of_pass
from engine.model.runner import LayerHooks, ModelInfo
from engine.model.sampling.logprobs import token_logprobs
from engine.model.sampling.sampler import Sampler
from engine.model.sampling.table import SamplingTable
from engine.model.staging import to_device
from engine.model.states import RequestRows
from engine.scheduling.output import ModelOutput, SchedulerOutput
from engine.structured.grammars import Grammars
from engine.structured.masks import GrammarMasks
from wire.errors import InvalidLogits
from wire.sampling import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from engine.model.prefault import PageMaker


class TorchRunner:
    """See engine.model.runner.ModelRunner. A request is known from its first step until it has finished; while
    it is preempted only its parameters are kept, for it comes back with all else."""

    def __init__(
        self,
        info: ModelInfo,
        kv_cache: torch.Tensor,
        forward: Forward,
        *,
        block_size: int,
        max_num_seqs: int,
        num_speculative_tokens: int,
        grammars: Grammars | None = None,
    ) -> None:
        self._info = info
        self._kv_cache = kv_cache
        self.pages: PageMaker | None = None
        self._forward = forward
        self._block_size = block_size
        self._num_drafts = num_speculative_tokens
        self._device = kv_cache.device
        # Drafts stand behind a request's tokens, even behind its last.
        max_tokens = info.max_model_len + num_speculative_tokens + 1
        self._requests = RequestRows(max_num_seqs, max_tokens, block_size, len(info.groups))
        self._table = SamplingTable(max_num_seqs)
        self._grammars = grammars
        masks = GrammarMasks(grammars) if grammars is not None else None
        self._sampler = Sampler(info.vocab_size, info.eos_token_ids, self._device, masks)
        self._preempted: dict[str, tuple[SamplingParams, int]] = {}
        self._prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def kv_cache(self) -> torch.Tensor:
        return self._kv_cache

    @property
    def grammars(self) -> Grammars | None:
        return self._grammars

    @property
    def forward(self) -> Forward:
        return self._forward

    def forget_requests(self) -> None:
        for req_id in self._requests.req_ids:
            self._forget(req_id)
        self._preempted.clear()
        self._prompt_logprobs.clear()

    def execute(self, step: SchedulerOutput, hooks: LayerHooks | None = None) -> ModelOutput:
        with torch.inference_mode():
            self._update(step)
            output = ModelOutput({})
            if not step.num_scheduled_tokens:
                return output
            if step.new_block_ids_to_zero:
                self._kv_cache[step.new_block_ids_to_zero] = 0
            unreported = self._unreported_prompts()
            passes = cut_for_logits(self._requests, step.num_scheduled_tokens, unreported)
            for index, counts in enumerate(passes):
                last = index + 1 == len(passes)
                drafts = step.spec_token_ids if last else {}
                batch, scheduled = build_batch(
                    self._requests, counts, drafts, unreported, self._block_size, self._device
                )
                logits = self._forward(batch, hooks_of_pass(hooks, index == 0, last))
                self._collect(batch, scheduled, logits, output)
                if not last:
                    self._requests.num_computed[scheduled.rows] += np.diff(scheduled.query_start)
            return output

    def _unreported_prompts(self) -> set[int]:
        """Rows whose prompt's log-probabilities are still to come. With the first token they have been told, be it
        by us before a preemption or by another node."""
        known, prompts = self._requests.num_tokens, self._requests.num_prompt_tokens
        return {row for row in self._table.prompt_logprobs if known[row] == prompts[row]}

    def _update(self, step: SchedulerOutput) -> None:
        for req_id in step.finished_req_ids:
            self._forget(req_id)
            self._preempted.pop(req_id, None)
        for req_id in step.preempted_req_ids:
            if req_id in self._requests:
                row = self._requests.row(req_id)
                self._preempted[req_id] = (
                    self._table.params[row],
                    int(self._requests.num_prompt_tokens[row]),
                )
                self._forget(req_id)
        for new in step.new_reqs:
            row = self._requests.add(new.req_id, new.token_ids, new.num_prompt_tokens, new.block_ids)
            self._requests.num_computed[row] = new.num_computed_tokens
            if self.pages is not None:
                self.pages.reached(max((max(ids) for ids in new.block_ids if ids), default=0))
            self._table.set(row, new.sampling)
        cached = step.cached_reqs
        for req_id, num_computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if req_id in cached.resumed_req_ids:
                row = self._resume(req_id, cached.resumed_token_ids[req_id], blocks or [])
            else:
                row = self._requests.row(req_id)
                if blocks is not None:
                    self._requests.append_blocks(row, blocks)
            self._requests.num_computed[row] = num_computed

    def _resume(self, req_id: str, token_ids: list[int], block_ids: list[list[int]]) -> int:
        if req_id in self._requests:
            row = self._requests.row(req_id)
            params, num_prompt = self._table.params[row], int(self._requests.num_prompt_tokens[row])
        else:
            params, num_prompt = self._preempted.pop(req_id)
        row = self._requests.add(req_id, token_ids, num_prompt, block_ids)
        self._table.set(row, params)
        self._prompt_logprobs.pop(req_id, None)
        return row

    def _forget(self, req_id: str) -> None:
        row = self._requests.remove(req_id)
        if row is not None:
            self._table.clear(row)
        self._prompt_logprobs.pop(req_id, None)

    def _collect(self, batch: Batch, scheduled: Scheduled, logits: torch.Tensor, output: ModelOutput) -> None:
        if unreported := self._unreported_prompts():
            self._collect_prompt_logprobs(unreported, batch, scheduled, logits, output)
        which = np.flatnonzero(scheduled.samples)
        if not which.size:
            return
        lengths = scheduled.num_drafts[which] + 1
        starts = np.concatenate(([0], np.cumsum(lengths)))
        # Row i of a request's sampled rows chooses the token at `context - drafts + i`.
        behind = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        logit_index = np.repeat(scheduled.first_sample[which], lengths) + behind
        first_position = batch.host_context_lens[which] - scheduled.num_drafts[which]
        positions = np.repeat(first_position, lengths).astype(np.int64) + behind
        rows = np.repeat(scheduled.rows[which], lengths)
        if len(logit_index) != logits.shape[0]:
            logits = logits[to_device(logit_index, logits.device)]
        chosen = self._sampler.sample(logits, rows, positions, self._requests, self._table)
        tokens = chosen.tolist()
        for index, start, length in zip(which.tolist(), starts.tolist(), lengths.tolist(), strict=False):
            req_id, row = scheduled.req_ids[index], int(scheduled.rows[index])
            if failed := self._sampler.failed.get(row):
                output.errors[req_id] = failed
                continue
            sampled = tokens[start : start + length]
            if length > 1:
                sampled = sampled[: self._accepted(row, sampled) + 1]
            if sampled[-1] < 0:
                output.errors[req_id] = InvalidLogits(
                    "the model's output is no number: infinite, undefined, or nothing may follow"
                )
                continue
            if row in self._table.logprobs:
                end = start + len(sampled)
                output.logprobs[req_id] = token_logprobs(
                    logits[start:end], chosen[start:end], self._table.logprobs[row]
                )
            self._requests.append_tokens(row, sampled)
            output.sampled_token_ids[req_id] = sampled
            if self._num_drafts:
                drafts = self._propose(row)
                if drafts:
                    output.draft_token_ids[req_id] = drafts

    def _accepted(self, row: int, sampled: list[int]) -> int:
        """How many drafts are what was sampled in their place.

        The noise of a position does not depend on how its logits came about, so a draft that agrees is the very
        token that a step without drafts would have chosen, and everything after one that disagrees is void.
        """
        known = int(self._requests.num_tokens[row])
        drafts = self._requests.tokens[row, known : known + len(sampled) - 1].tolist()
        for index, draft in enumerate(drafts):
            if draft != sampled[index]:
                return index
        return len(drafts)

    def _propose(self, row: int) -> list[int]:
        known = int(self._requests.num_tokens[row])
        room = min(self._num_drafts, self._info.max_model_len - known - 1)
        return propose(self._requests.tokens[row, :known], room) if room > 0 else []

    def _collect_prompt_logprobs(
        self,
        unreported: set[int],
        batch: Batch,
        scheduled: Scheduled,
        logits: torch.Tensor,
        output: ModelOutput,
    ) -> None:
        """Logits of prompt positions come chunk by chunk; the whole list is reported with the last of them."""
        wanted: npt.NDArray[np.int64] = batch.logit_rows.cpu().numpy()
        for index, row in enumerate(scheduled.rows.tolist()):
            if row not in unreported:
                continue
            num_prompt = int(self._requests.num_prompt_tokens[row])
            context = int(batch.host_context_lens[index])
            start, end = int(scheduled.query_start[index]), int(scheduled.query_start[index + 1])
            first = context - (end - start)
            req_id = scheduled.req_ids[index]
            collected = self._prompt_logprobs.setdefault(req_id, [None] * num_prompt)
            count = min(context, num_prompt - 1) - first
            if count > 0:
                low = int(np.searchsorted(wanted, start))
                following = torch.from_numpy(
                    self._requests.tokens[row, first + 1 : first + 1 + count].astype(np.int64)
                )
                collected[first + 1 : first + 1 + count] = token_logprobs(
                    logits[low : low + count], following.to(logits.device), self._table.prompt_logprobs[row]
                )
            if context >= num_prompt:
                output.prompt_logprobs[req_id] = self._prompt_logprobs.pop(req_id)
