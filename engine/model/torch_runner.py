"""The runner (engine.model.runner.ModelRunner): keeps the requests' rows, starts steps on the device, samples, and proposes drafts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tandem.base.errors import InternalError, InvalidLogits
from tandem.engine.model.batching import (
    PromptPiece,
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
from tandem.engine.model.draft_model import DraftModel, propose_from_text
from tandem.engine.model.eagle import EagleHead
from tandem.engine.model.pooler import PooledVector, Pooler, PoolingPart, read_vector
from tandem.engine.model.runner import Batch, Forward, LayerHooks, ModelInfo
from tandem.engine.model.sampling.logprobs import ComputedLogprobs
from tandem.engine.model.sampling.sampler import Sampler
from tandem.engine.model.staging import DeviceMark, HostCopy, on, to_device
from tandem.engine.model.vision.rows import ImageRows, rows_of
from tandem.engine.scheduling.output import BlockIds, ModelOutput, SchedulerOutput
from tandem.engine.structured.grammars import Grammars
from tandem.engine.structured.masks import GrammarMasks
from tandem.wire.images import MediaFeature
from tandem.wire.requests import RequestFacts
from tandem.wire.sampling import TokenLogprobs

if TYPE_CHECKING:
    from tandem.engine.model.hidden_states import HiddenStates
    from tandem.engine.model.lora.slots import AdapterSlots
    from tandem.engine.model.prefault import PageMaker
    from tandem.engine.model.vision.tower import VisionTower


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """What only a request's first step says about it. It is kept while the request is preempted."""

    facts: RequestFacts
    image_parts: Sequence[MediaFeature]
    embeds: torch.Tensor | None


class TorchRunner:
    """See engine.model.runner.ModelRunner. The runner knows a request from its first step until it has finished. While a request
    is preempted only its `_Asked` is kept; it comes back with its tokens and blocks."""

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
        adapters: AdapterSlots | None = None,
        tower: VisionTower | None = None,
        draft_model: DraftModel | EagleHead | None = None,
        hidden_states: HiddenStates | None = None,
    ) -> None:
        self._info = info
        self._kv_cache = kv_cache
        self.pages: PageMaker | None = None  # None once the memory of the whole cache has been faulted in
        self._forward = forward
        self._block_size = block_size
        self._num_drafts = num_speculative_tokens
        self._draft_model = draft_model  # None: drafts come from the text itself
        self._head = draft_model if isinstance(draft_model, EagleHead) else None
        self._device = kv_cache.device
        # A row has room for drafts after the request's last token.
        max_tokens = info.max_model_len + num_speculative_tokens + 1
        state_blocks = sum(group.blocks_per_request for group in info.groups)
        num_groups = len(info.groups) - (state_blocks > 0)
        self._requests = RequestRows(max_num_seqs, max_tokens, block_size, num_groups, state_blocks)
        self._table = SamplingTable(max_num_seqs)
        self._grammars = grammars
        self._adapters = adapters
        self._loras: dict[int, str] = {}  # the identity of each request's adapter, by row
        self._images = ImageRows(tower, self._device)
        self._masks = GrammarMasks(grammars) if grammars is not None else None
        self._sampler = Sampler(info.vocab_size, info.eos_token_ids, self._device, self._masks)
        self._pooler = Pooler()
        self._hidden_states = hidden_states  # None: no request may ask for hidden states
        self._states_wanted: dict[int, str] = {}  # the file for a request's hidden states, by row
        self._asked: dict[int, _Asked] = {}  # by row
        self._preempted: dict[str, _Asked] = {}  # of preempted requests, which have no row
        self._prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}
        self._no_hidden = torch.empty(0, 0, device=self._device)
        self._unfinished: StepOnDevice | None = None  # the newest step, until its tokens are read

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
    def adapters(self) -> AdapterSlots | None:
        return self._adapters

    @property
    def states_wait(self) -> bool:
        return self._hidden_states is not None and self._hidden_states.is_full

    @property
    def draft_model(self) -> DraftModel | EagleHead | None:
        return self._draft_model

    @property
    def forward(self) -> Forward:
        return self._forward

    def forget_requests(self) -> None:
        for req_id in self._requests.req_ids:
            self._forget(req_id)
        self._preempted.clear()
        self._prompt_logprobs.clear()
        self._images.forget_all()
        if self._draft_model is not None:
            self._draft_model.forget_requests()

    def start(self, step: SchedulerOutput, hooks: LayerHooks | None = None) -> StepOnDevice:
        with on(self._device), torch.inference_mode():
            self._update(step)
            if step.encoder_inputs or step.forgotten_media:
                self._images.update(step)
            started = StepOnDevice(self._finish, draft_limits=step.draft_limits)
            if not step.num_scheduled_tokens:
                return started
            if step.new_block_ids_to_zero:
                fresh = to_device(np.array(step.new_block_ids_to_zero, np.int64), self._device)
                self._kv_cache.index_fill_(0, fresh, 0)
            if step.state_copies:
                # Lists as indices would be copied from ordinary memory, and wait for the device.
                sources, targets = to_device(np.array(step.state_copies, np.int64).T.copy(), self._device)
                blocks = self._kv_cache.view(torch.uint8)
                blocks[targets] = blocks[sources]
            unreported = self._unreported_prompts()
            unread = self._unfinished.unread if self._unfinished is not None else None
            passes = cut_for_logits(self._requests, step.num_scheduled_tokens, unreported)
            for index, counts in enumerate(passes):
                last = index + 1 == len(passes)
                drafts = step.spec_token_ids if last else {}
                batch, scheduled = build_batch(
                    self._requests,
                    counts,
                    drafts,
                    unreported,
                    self._block_size,
                    self._device,
                    unread,
                    self._pooler if self._pooler.parts else None,
                )
                if self._loras:
                    batch = self._with_adapters(batch, scheduled)
                if self._images.media or self._images.embeds:
                    batch, errors = self._images.placed(batch, scheduled)
                    started.errors |= errors
                for_head = self._wants_guesses(scheduled)
                if self._head is not None and for_head is not None and self._head.observed is None:
                    rows = np.flatnonzero(np.repeat(for_head, np.diff(scheduled.query_start)))
                    batch = dataclasses.replace(batch, hidden_rows=to_device(rows, self._device))
                logits = self._forward(batch, hooks_of_pass(hooks, index == 0, last))
                if self._head is not None and for_head is not None:
                    hidden = self._forward.hidden if self._head.observed is None else None
                    self._head.take(self._requests, batch, scheduled, for_head, hidden)
                if self._states_wanted and self._hidden_states is not None:
                    self._hidden_states.take(self._states_wanted, batch, scheduled, self._requests)
                if scheduled.pooled:
                    started.vectors += self._pooled(batch, scheduled)
                if unreported:
                    started.pieces += self._pieces_of_prompts(unreported, batch, scheduled, logits)
                if scheduled.samples.any():
                    self._sample(batch, scheduled, logits, started)
                if not last:
                    self._requests.num_computed[scheduled.rows] += np.diff(scheduled.query_start)
            if started.sampled is None:
                started.end = DeviceMark(self._device)
            self._unfinished = started
            return started

    def _wants_guesses(self, scheduled: ScheduledTokens) -> npt.NDArray[np.bool_] | None:
        """The requests that the EAGLE head makes drafts for: those that may get more than one token, so none on a prefill node.
        Returns None when there is none."""
        if self._head is None or scheduled.pooled:
            return None
        said = self._requests.num_tokens[scheduled.rows] - self._requests.num_prompt_tokens[scheduled.rows]
        most = np.array([self._table.params[row].max_tokens for row in scheduled.rows.tolist()])
        found: npt.NDArray[np.bool_] = most > said + 1
        return found if found.any() else None

    def _pooled(self, batch: Batch, scheduled: ScheduledTokens) -> list[PooledVector]:
        # A chunk may have no hidden rows: with pooling of the last token, only the last chunk has one.
        hidden = self._forward.hidden if batch.hidden_rows is not None else self._no_hidden
        return self._pooler.take(scheduled.pooled, hidden, self._requests.tenancies)

    def _unreported_prompts(self) -> set[int]:
        """Rows of requests whose prompt log-probabilities have not been reported. A request with an output token has reported them,
        perhaps before a preemption or on another node."""
        known, prompts = self._requests.num_tokens, self._requests.num_prompt_tokens
        return {row for row in self._table.prompt_logprobs if known[row] == prompts[row]}

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
            embeds = rows_of(new.facts.embeds) if new.facts.embeds is not None else None
            asked = _Asked(new.facts, new.image_parts, embeds)
            row = self._add(new.req_id, new.token_ids, new.block_ids, asked)
            self._requests.num_computed[row] = new.num_computed_tokens
            if self.pages is not None:
                last = max((max(ids) for ids in new.block_ids if ids), default=0)
                if not self.pages.reached(last):
                    self.pages = None
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
            asked = self._asked[self._requests.row(req_id)]
        else:
            asked = self._preempted.pop(req_id)
        self._prompt_logprobs.pop(req_id, None)
        return self._add(req_id, token_ids, block_ids, asked)

    def _add(self, req_id: str, token_ids: list[int], block_ids: BlockIds, asked: _Asked) -> int:
        facts = asked.facts
        row = self._requests.add(req_id, token_ids, len(facts.prompt_token_ids), block_ids)
        self._clear(row)
        self._asked[row] = asked
        self._table.set(row, facts.sampling)
        if facts.sampling.hidden_states is not None:
            self._states_wanted[row] = facts.sampling.hidden_states
        if facts.pooling is not None:
            self._pooler.parts[row] = PoolingPart(facts.pooling)
        if facts.lora is not None:
            self._loras[row] = facts.lora
        if asked.image_parts:
            self._images.media[row] = asked.image_parts
        if asked.embeds is not None:
            self._images.embeds[row] = asked.embeds
            self._requests.num_unsaid[row] = asked.embeds.shape[0]
        return row

    def _clear(self, row: int) -> None:
        """Forgets everything about the row's request but its tokens and blocks."""
        self._asked.pop(row, None)
        self._table.clear(row)
        self._pooler.parts.pop(row, None)
        self._loras.pop(row, None)
        self._images.media.pop(row, None)
        self._images.embeds.pop(row, None)
        self._states_wanted.pop(row, None)

    def _with_adapters(self, batch: Batch, scheduled: ScheduledTokens) -> Batch:
        """Adds the slot of each row's adapter to the batch, if any row has one."""
        wanted = {row: self._loras[row] for row in scheduled.rows.tolist() if row in self._loras}
        if not wanted:
            return batch
        if self._adapters is None:
            raise InternalError("a request has an adapter, and the model was loaded without")
        slots = self._adapters.place(set(wanted.values()))
        of_request = np.array(
            [slots[wanted[row]] if row in wanted else -1 for row in scheduled.rows.tolist()], np.int64
        )
        of_token = np.repeat(of_request, np.diff(scheduled.query_start))
        return dataclasses.replace(
            batch,
            adapter_slots=to_device(of_token, self._device),
            adapter_slots_used=max(slots.values()) + 1,
        )

    def _forget(self, req_id: str) -> None:
        row = self._requests.remove(req_id)
        if row is not None:
            if row in self._states_wanted and self._hidden_states is not None:
                self._hidden_states.forget(row)
            self._clear(row)
        self._prompt_logprobs.pop(req_id, None)

    def _sample(
        self, batch: Batch, scheduled: ScheduledTokens, logits: torch.Tensor, started: StepOnDevice
    ) -> None:
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
        tokens = self._sampler.sample(
            logits, np.repeat(rows, lengths), positions, self._requests, self._table
        )
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
        self._read_prompts(started.pieces, output)
        self._read_vectors(started.vectors, output)
        if started.sampled is not None:
            self._read_sampled(started.sampled, started.draft_limits, output)
        output.errors |= started.errors
        return output

    def _read_sampled(
        self, sampled: SampledTokens, limits: dict[str, int] | None, output: ModelOutput
    ) -> None:
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
            if of_request[-1] < 0:
                output.errors[req_id] = InvalidLogits(
                    "the model's output is no number: infinite, undefined, or nothing may follow"
                )
                continue
            if (computed := sampled.logprobs.get(row)) is not None:
                output.logprobs[req_id] = computed.read()[: len(of_request)]
            self._requests.append_tokens(row, of_request)
            output.sampled_token_ids[req_id] = of_request
            if num_drafts := limits.get(req_id, 0) if limits is not None else self._num_drafts:
                room = self._info.max_model_len - int(self._requests.num_tokens[row]) - 1
                if room > 0:
                    wanted[req_id] = min(num_drafts, room)
        if wanted:
            began = time.perf_counter()
            self._propose(wanted, output)
            output.drafting_s = time.perf_counter() - began

    def _read_vectors(self, vectors: list[PooledVector], output: ModelOutput) -> None:
        for one in vectors:
            vector = read_vector(one)
            if self._requests.tenancies[one.row] != one.tenancy:
                continue
            if vector is None:
                output.errors[one.req_id] = InvalidLogits(
                    "the model's output is no number: a part of the vector is infinite or undefined"
                )
            else:
                output.vectors[one.req_id] = vector

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

    def _propose(self, wanted: dict[str, int], output: ModelOutput) -> None:
        requests, model = self._requests, self._draft_model
        if model is not None:
            guessed = model.propose(requests, wanted)
            output.guess_s = model.guess_s
        else:
            guessed = {}
            for req_id, most in wanted.items():
                row = requests.row(req_id)
                guessed[req_id] = propose_from_text(
                    requests.tokens[row, : int(requests.num_tokens[row])], most
                )
        for req_id, drafts in guessed.items():
            row = requests.row(req_id)
            if drafts and self._masks is not None and self._table.constrained[row]:
                # A draft that the grammar forbids would be verified in vain.
                drafts = drafts[: self._masks.num_allowed(row, drafts, requests, self._table)]
            if drafts:
                output.draft_token_ids[req_id] = drafts

    def _pieces_of_prompts(
        self, unreported: set[int], batch: Batch, scheduled: ScheduledTokens, logits: torch.Tensor
    ) -> list[PromptPiece]:
        """The log-probabilities of the prompt tokens in this pass. They are collected chunk by chunk, and reported together with
        the last one."""
        pieces: list[PromptPiece] = []
        for index, row in enumerate(scheduled.rows.tolist()):
            if row not in unreported:
                continue
            num_prompt = int(self._requests.num_prompt_tokens[row])
            context = int(batch.host_context_lens[index])
            start, end = int(scheduled.query_start[index]), int(scheduled.query_start[index + 1])
            first = context - (end - start) + 1
            count = min(context, num_prompt - 1) - first + 1
            computed = None
            if count > 0:
                low = int(np.searchsorted(scheduled.logit_rows, start))
                following = self._requests.tokens[row, first : first + count].astype(np.int64)
                computed = ComputedLogprobs(
                    logits[low : low + count],
                    to_device(following, logits.device),
                    self._table.prompt_logprobs[row],
                )
            pieces.append(
                PromptPiece(scheduled.req_ids[index], first, num_prompt, context >= num_prompt, computed)
            )
        return pieces

    def _read_prompts(self, pieces: list[PromptPiece], output: ModelOutput) -> None:
        for piece in pieces:
            collected = self._prompt_logprobs.setdefault(piece.req_id, [None] * piece.num_prompt)
            if piece.logprobs is not None:
                found = piece.logprobs.read()
                collected[piece.first : piece.first + len(found)] = found
            if piece.is_last:
                output.prompt_logprobs[piece.req_id] = self._prompt_logprobs.pop(piece.req_id)
