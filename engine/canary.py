"""A canary for wrong KV: in idle time, a small share of the prompts whose KV came from a peer is computed again here, and
the two are compared.

A checksum proves that the bytes arrived as they were sent. The canary proves that they were right: it finds a device that
computes wrongly, two nodes whose weights differ, and a block that was reused while it travelled.

It runs between turns of the step loop, a few tokens at a time, and only while the engine has nothing else to do. It gives up
its blocks as soon as a request arrives, and begins again later. Its own KV is never cached.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.engine.request import Request
from tandem.engine.scheduling.output import BlockIds, CachedRequestData, NewRequestData, SchedulerOutput
from tandem.kvtransfer.base import NULL_BLOCK_ID
from tandem.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from tandem.engine.model.runner import ModelRunner
    from tandem.engine.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

REQUEST_ID = "canary"
STEP_TOKENS = 128  # computed between two looks at the mailbox
ATTEMPTS = 20  # beginnings, before a prompt that is always interrupted is given up
# The largest difference that rounding explains, relative to a block's norm: the two sides may sum in another order.
TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 8e-2, "float8_e4m3fn": 0.15}
_NOT_SAMPLED = SamplingParams(temperature=0.0, max_tokens=1)


@dataclasses.dataclass(slots=True)
class _Check:
    request_id: str  # whose KV is checked
    peer: str  # the node that sent it
    prompt: list[int]
    cache_salt: str | None
    lora: str | None
    attempts: int = 0
    own: Request | None = None  # while it is computed again, and holds blocks
    blocks: BlockIds = dataclasses.field(default_factory=list)
    computed: int = 0


class Canary:
    """Used from the step thread. At most one prompt is checked at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        share: float,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`share`: of the prompts that were handed over, how many are checked, as far as idle time allows."""
        self._scheduler = scheduler
        self._runner = runner
        self._share = share
        self._draw = draw
        self._tolerance = TOLERANCE[runner.info.dtype]
        self._check: _Check | None = None
        self.checked = 0  # prompts
        self.wrong: Counter[str] = (
            Counter()
        )  # blocks that differ by more than rounding explains, by the node that sent them

    @property
    def has_work(self) -> bool:
        return self._check is not None

    @property
    def lora(self) -> str | None:
        """The adapter of the prompt that is checked, or will be."""
        return self._check.lora if self._check is not None else None

    def loaded(self, request: Request) -> None:
        """The KV of its whole prompt is here, from a peer. A newer prompt replaces one that still waits for idle time: its
        blocks stay cached for longer."""
        hasher = self._scheduler.block_hasher
        if hasher is None or request.num_prompt_tokens < hasher.block_size or request.media:
            return  # no block of it can be found again, or what its images become is not here
        if (self._check is None or self._check.own is None) and self._draw() < self._share:
            peer = request.transfer.peer.node_id if request.transfer is not None else "a connector"
            self._check = _Check(
                request.request_id, peer, request.prompt_token_ids, request.cache_salt, request.lora
            )

    def step(self) -> None:
        """Computes a few tokens, or compares. To be called only while the engine is idle."""
        check = self._check
        if check is None:
            return
        if check.own is None and not self._begin(check):
            self._check = None  # no room, or interrupted too often
            return
        if check.computed < len(check.prompt):
            self._compute(check)
        if check.computed == len(check.prompt):
            self._compare(check)
            self._end(check)
            self._check = None

    def stand_aside(self) -> None:
        """Gives up the blocks. The prompt is computed from its beginning when the engine is idle again."""
        if self._check is not None and self._check.own is not None:
            self._end(self._check)

    def close(self) -> None:
        """Checks nothing any more: the node is to go."""
        self._share = 0.0
        self.stand_aside()
        self._check = None

    def _begin(self, check: _Check) -> bool:
        check.attempts += 1
        own = Request(
            REQUEST_ID,
            check.prompt,
            _NOT_SAMPLED,
            output_token_ids=check.prompt[
                :1
            ],  # a look-up leaves the last token out: so it finds the whole prompt
            cache_salt=check.cache_salt,
            lora=check.lora,
            block_hasher=self._scheduler.block_hasher,
        )
        blocks = self._scheduler.lend_blocks(own) if check.attempts <= ATTEMPTS else None
        if blocks is None:
            return False
        check.own, check.blocks, check.computed = own, blocks, 0
        return True

    def _compute(self, check: _Check) -> None:
        tokens = min(STEP_TOKENS, len(check.prompt) - check.computed)
        step = _empty_step()
        step.num_scheduled_tokens[REQUEST_ID] = step.total_num_scheduled_tokens = tokens
        if check.computed == 0:
            new = NewRequestData(
                REQUEST_ID, check.prompt, len(check.prompt), _NOT_SAMPLED, check.blocks, 0, check.lora
            )
            step.new_reqs.append(new)
        else:
            step.cached_reqs = CachedRequestData([REQUEST_ID], [check.computed], [None])
        self._runner.start(step).finish()
        check.computed += tokens

    def _end(self, check: _Check) -> None:
        forget = _empty_step()
        forget.finished_req_ids.add(REQUEST_ID)
        self._runner.start(forget).finish()
        self._scheduler.take_blocks_back(REQUEST_ID)
        check.own, check.blocks, check.computed = None, [], 0

    def _compare(self, check: _Check) -> None:
        """With the blocks that are cached under the prompt's hashes. Those that were evicted are left out."""
        if check.own is None:
            return
        cached, num_tokens = self._scheduler.find_prefix(check.own)
        if num_tokens == 0:
            return
        pairs = [
            (own, there)
            for table, hits in zip(check.blocks, cached, strict=True)
            for own, there in zip(table, hits, strict=False)
            if there != NULL_BLOCK_ID
        ]
        kept = str(self._runner.kv_cache.dtype).removeprefix("torch.")
        allowed = max(self._tolerance, TOLERANCE[kept])
        wrong = {there: off for own, there in pairs if not (off := self._difference(own, there)) <= allowed}
        self.checked += 1
        if not wrong:
            return
        self.wrong[check.peer] += len(wrong)
        self._scheduler.uncache(there for _, there in pairs)
        logger.error(
            "the KV of %s, received from %s, is wrong in %d of %d blocks: computed here again it differs by up to %.2g of a block's "
            "norm, where %.2g is rounding. Its blocks are not used for other requests. Compare the two nodes' weights, devices and links.",
            check.request_id, check.peer, len(wrong), len(pairs), max(wrong.values()), allowed,
        )  # fmt: skip

    def _difference(self, own: int, there: int) -> float:
        """The norm of the difference of two blocks relative to the norm, in the layer where it is largest; NaN for what is no
        number."""
        kv = self._runner.kv_cache
        ours, theirs = kv[own].float().flatten(1), kv[there].float().flatten(1)
        return float(((ours - theirs).norm(dim=1) / ours.norm(dim=1).clamp_min(1e-6)).max())


def _empty_step() -> SchedulerOutput:
    return SchedulerOutput(
        new_reqs=[],
        cached_reqs=CachedRequestData(),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        spec_token_ids={},
        finished_req_ids=set(),
        preempted_req_ids=set(),
    )
