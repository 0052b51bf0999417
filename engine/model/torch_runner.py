"""The runner (engine.model.runner.ModelRunner): keeps the requests' rows, starts steps on the device, samples, and proposes drafts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tandem.base.errors import InternalError, InvalidLogits
from tandem.engine.model.batching import (
    RequestRows,
    SampledTokens,
    SamplingTable,
    ScheduledTokens,
    StepOnDevice,
    UnreadTokens,
    build_batch,
    cut_for_logits,
    hooks_of_pass,
)
from tandem.engine.model.parts import AskedRequest, Drafter, RunnerPart, TokenMasks
from tandem.engine.model.runner import Batch, Forward, Grammars, LayerHooks, ModelInfo
from tandem.engine.model.sampling.logprobs import ComputedLogprobs
from tandem.engine.model.sampling.prompt_logprobs import PromptLogprobs
from tandem.engine.model.sampling.sampler import Sampler
from tandem.engine.model.staging import DeviceMark, HostCopy, on, to_device
from tandem.engine.scheduling.output import BlockIds, ModelOutput, SchedulerOutput

if TYPE_CHECKING:
    from tandem.engine.model.adapter_book import AdapterBook
    from tandem.engine.model.prefault import PageMaker

# Tokens that a grammar forces and that one step computes. A key of a schema has fewer.
FORCED_AT_ONCE = 16


class TorchRunner:
    """See engine.model.runner.ModelRunner. The runner knows a request from its first step until it has finished. While a request
    is preempted only its `AskedRequest` is kept; it comes back with its tokens and blocks."""

    def __init__(
        self,
        info: ModelInfo,
        kv_cache: torch.Tensor,
        forward: Forward,
        *,
        block_size: int,
        max_num_seqs: int,
        num_speculative_tokens: int,
        masks: TokenMasks | None = None,
        adapters: AdapterBook[Any] | None = None,
        parts: Sequence[RunnerPart] = (),
        drafter: Drafter | None = None,
    ) -> None:
        self.info = info
        self.kv_cache = kv_cache
        self.pages: PageMaker | None = None  # None where the cache's memory is not faulted in ahead
        self.forward = forward
        self._block_size = block_size
        self._num_drafts = num_speculative_tokens
        self.drafter = drafter
        self.parts = parts
        self._device = kv_cache.device
        # A row has room for drafts after the request's last token.
        most_drafts = max(num_speculative_tokens, FORCED_AT_ONCE if masks is not None else 0)
        max_tokens = info.max_model_len + most_drafts + 1
        state_blocks = sum(group.blocks_per_request for group in info.groups)
        num_groups = len(info.groups) - (state_blocks > 0)
        self._requests = RequestRows(max_num_seqs, max_tokens, block_size, num_groups, state_blocks)
        self._table = SamplingTable(max_num_seqs)
        self.adapters = adapters
        self._masks = masks
        self._sampler = Sampler(info.vocab_size, info.eos_token_ids, self._device, masks)
        self._asked: dict[int, AskedRequest] = {}  # by row
        self._preempted: dict[str, AskedRequest] = {}  # of preempted requests, which have no row
        self._prompts = PromptLogprobs(self._requests, self._table)
        self._unfinished: StepOnDevice | None = None  # the newest step, until its tokens are read

    @property
    def kv_in_memory(self) -> int:
        return self.kv_cache.nbytes if self.pages is None else self.pages.made

    @property
    def grammars(self) -> Grammars | None:
        return self._masks.grammars if self._masks is not None else None

    @property
    def states_wait(self) -> bool:
        return any(part.is_full for part in self.parts)

    def forget_requests(self) -> None:
        for req_id in self._requests.req_ids:
            self._forget(req_id)
        self._preempted.clear()
        self._prompts.clear()
        for part in self.parts:
            part.forget_requests()
        if self.drafter is not None:
            self.drafter.forget_requests()

    def start(self, step: SchedulerOutput, hooks: LayerHooks | None = None) -> StepOnDevice:
        with on(self._device), torch.inference_mode():
            self._update(step)
            for part in self.parts:
                part.begin(step)
            started = StepOnDevice(self._finish, draft_limits=step.draft_limits)
            if not step.num_scheduled_tokens:
                return started
            if step.state_copies:
                # Lists as indices would be copied from ordinary memory, and wait for the device.
                sources, targets = to_device(np.array(step.state_copies, np.int64).T.copy(), self._device)
                blocks = self.kv_cache.view(torch.uint8)
                blocks[targets] = blocks[sources]
            unreported = self._prompts.unreported()
            unread = self._unfinished.unread if self._unfinished is not None else None
            passes = cut_for_logits(self._requests, step.num_scheduled_tokens, unreported)
            for index, counts in enumerate(passes):
                last = index + 1 == len(passes)
                drafts = step.spec_token_ids if last else {}
                batch, scheduled = build_batch(
                    self._requests, counts, drafts, unreported, self._block_size, self._device, unread
                )
                for part in self.parts:
                    batch = part.prepare(batch, scheduled, self._requests, started)
                logits = self.forward(batch, hooks_of_pass(hooks, index == 0, last))
                for part in self.parts:
                    part.computed(batch, scheduled, self._requests, started, self.forward)
                if unreported:
                    self._prompts.computed(unreported, batch, scheduled, logits, started)
                if scheduled.samples.any():
                    self._sample(batch, scheduled, logits, started)
                if not last:
                    self._requests.num_computed[scheduled.rows] += np.diff(scheduled.query_start)
            if started.sampled is None:
                started.end = DeviceMark(self._device)
            self._unfinished = started
            return started

    def _update(self, step: SchedulerOutput) -> None:
        for req_id in step.finished_req_ids:
            self._forget(req_id)
            self._preempted.pop(req_id, None)
        for req_id in step.preempted_req_ids:
            if req_id in self._requests:
                row = self._requests.row(req_id)
                self._preempted[req_id] = self._asked[row]
                self._forget(req_id)
        for new in step.new_reqs:
            asked = AskedRequest(new.facts, new.image_parts)
            row = self._add(new.req_id, new.token_ids, new.block_ids, asked)
            self._requests.num_computed[row] = new.num_computed_tokens
            if self.pages is not None:
                last = max((max(ids) for ids in new.block_ids if ids), default=0)
                self.pages.reached(last)
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
        asked = self._asked[self._requests.row(req_id)] if req_id in self._requests else self._preempted.pop(req_id)
        self._prompts.forget(req_id)
        return self._add(req_id, token_ids, block_ids, asked)

    def _add(self, req_id: str, token_ids: list[int], block_ids: BlockIds, asked: AskedRequest) -> int:
        facts = asked.facts
        if facts.lora is not None and self.adapters is None:
            raise InternalError("a request has an adapter, and the model was loaded without")
        if asked.image_parts and self.info.images is None:
            raise InternalError("a request has images, and the model was loaded without its tower")
        if facts.pooling is not None and self.info.vectors is None:
            raise InternalError("a request is for a vector, and the model was loaded without")
        row = self._requests.add(req_id, token_ids, len(facts.prompt_token_ids), block_ids)
        self._clear(row)
        self._asked[row] = asked
        self._table.set(row, facts.sampling)
        for part in self.parts:
            part.add(row, asked, self._requests)
        return row

    def _clear(self, row: int) -> None:
        """Forgets everything about the row's request but its tokens and blocks."""
        self._asked.pop(row, None)
        self._table.clear(row)
        for part in self.parts:
            part.clear(row)

    def _forget(self, req_id: str) -> None:
        row = self._requests.remove(req_id)
        if row is not None:
            self._clear(row)
        self._prompts.forget(req_id)

    def _sample(self, batch: Batch, scheduled: ScheduledTokens, logits: torch.Tensor, started: StepOnDevice) -> None:
        which = np.flatnonzero(scheduled.samples)
        lengths = scheduled.num_drafts[which] + 1
        starts = np.concatenate(([0], np.cumsum(lengths)))
        # Row i of a request's rows of logits chooses the token at position `context - drafts + i`.
        behind = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        logit_index = np.repeat(scheduled.first_sample[which], lengths) + behind
        first_position = batch.host_context_lens[which] - scheduled.num_drafts[which]
        positions = np.repeat(first_position, lengths).astype(np.int64) + behind
        rows = scheduled.rows[which]
        if len(logit_index) != logits.shape[0]:
            logits = logits[to_device(logit_index, logits.device)]
        tokens = self._sampler.sample(logits, np.repeat(rows, lengths), positions, self._requests, self._table)
        wanted = self._table.logprobs
        logprobs = {
            row: ComputedLogprobs(logits[start : start + length], tokens[start : start + length], wanted[row])
            for row, start, length in zip(rows.tolist(), starts.tolist(), lengths.tolist(), strict=False)
            if row in wanted
        }
        started.unread = UnreadTokens(rows, tokens)
        started.sampled = SampledTokens(
            req_ids=[scheduled.req_ids[index] for index in which.tolist()],
            rows=rows,
            tenancies=self._requests.tenancies[rows],
            lengths=lengths,
            tokens=HostCopy(tokens),
            failed=self._sampler.failed,
            logprobs=logprobs,
        )

    def _finish(self, started: StepOnDevice) -> ModelOutput:
        if self._unfinished is started:
            self._unfinished = None
        # After a step is finished the engine may free its blocks, and a peer may write to them. So the device must have
        # finished the step, also when there is no token to wait for.
        if started.end is not None:
            started.end.wait()
        output = ModelOutput({})
        for read in started.unread_parts:
            read(output)
        if started.sampled is not None:
            self._read_sampled(started.sampled, started.draft_limits, output)
        output.errors |= started.errors
        return output

    def _read_sampled(self, sampled: SampledTokens, limits: dict[str, int] | None, output: ModelOutput) -> None:
        tokens: list[int] = sampled.tokens.read().tolist()
        # A request that left its row since then has no use for these tokens: if it comes back, it brings its own.
        here = self._requests.tenancies[sampled.rows] == sampled.tenancies
        start = 0
        wanted: dict[str, int] = {}
        for req_id, row, length, is_here in zip(
            sampled.req_ids, sampled.rows.tolist(), sampled.lengths.tolist(), here.tolist(), strict=True
        ):
            of_request = tokens[start : start + length]
            start += length
            if not is_here:
                continue
            if failed := sampled.failed.get(row):
                output.errors[req_id] = failed
                continue
            if length > 1:
                of_request = of_request[: self._accepted(row, of_request) + 1]
                if of_request[-1] < 0 and len(of_request) > 1 and self._table.constrained[row]:
                    of_request.pop()  # the next step computes it without drafts before it, and says what the grammar lacks
            if of_request[-1] < 0:
                output.errors[req_id] = InvalidLogits(
                    "the model's output is no number: infinite, undefined, or nothing may follow"
                )
                continue
            if (computed := sampled.logprobs.get(row)) is not None:
                output.logprobs[req_id] = computed.read()[: len(of_request)]
            self._requests.append_tokens(row, of_request)
            output.sampled_token_ids[req_id] = of_request
            if forced := self._forced(row):
                output.draft_token_ids[req_id] = forced
                output.forced_req_ids.add(req_id)
            elif num_drafts := limits.get(req_id, 0) if limits is not None else self._num_drafts:
                room = self.info.max_model_len - int(self._requests.num_tokens[row]) - 1
                if room > 0:
                    wanted[req_id] = min(num_drafts, room)
        if wanted and self.drafter is not None:
            began = time.perf_counter()
            self._propose(self.drafter, wanted, output)
            output.drafting_s = time.perf_counter() - began

    def _forced(self, row: int) -> list[int]:
        """What the row's grammar forces next. States that go back to before a draft would be computed twice for it."""
        if self._masks is None or not self._table.constrained[row] or self.info.state_blocks:
            return []
        room = self.info.max_model_len - int(self._requests.num_tokens[row]) - 1
        most = min(FORCED_AT_ONCE, room)
        return self._masks.forced(row, most, self._requests, self._table) if most > 0 else []

    def _accepted(self, row: int, sampled: list[int]) -> int:
        """How many leading drafts equal the tokens that were sampled in their place.

        The noise at a position does not depend on how its logits were computed, so a draft that agrees is the very token that a
        step without drafts would have chosen. Everything after a draft that disagrees is void.
        """
        known = int(self._requests.num_tokens[row])
        drafts = self._requests.tokens[row, known : known + len(sampled) - 1].tolist()
        for index, draft in enumerate(drafts):
            if draft != sampled[index]:
                return index
        return len(drafts)

    def _propose(self, drafter: Drafter, wanted: dict[str, int], output: ModelOutput) -> None:
        requests = self._requests
        guessed = drafter.propose(requests, wanted)
        output.guess_s = drafter.guess_s
        for req_id, drafts in guessed.items():
            row = requests.row(req_id)
            if drafts and self._masks is not None and self._table.constrained[row]:
                # A draft that the grammar forbids would be verified in vain.
                drafts = drafts[: self._masks.num_allowed(row, drafts, requests, self._table)]
            if drafts:
                output.draft_token_ids[req_id] = drafts
