"""Where in a prompt its recurrent states are kept for later prompts.

A state is found after exactly the tokens that it was kept after, so a step has to end there. Every place costs its prompt a step and
the pool some blocks. Two places of a prompt are worth that:

- the last block boundary before its end: the conversation's next turn goes on from there;
- where it parts from an earlier prompt: pages of the same tokens are cached up to there, no state is. What two prompts begin with, a
  third will, too. (A model without attention has no pages that would tell.)

A third costs no step: where a connector's load ends, which the tokens after it are computed from.

While a request answers nothing here needs its states, but a connector may, which copies them to another node. Those are kept for as long as it
reads them, `min_tokens` apart, and of few requests in one step: the others' turn comes a block later.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from tandem.engine.cache.group_manager import GroupManager
from tandem.engine.cache.state_slots import StateManager
from tandem.engine.request import Request
from tandem.kvtransfer.base import SchedulerConnector

# So many requests that answer are copied in one step, which each copy makes longer.
MOST_PASSING = 2


class Checkpoints:
    def __init__(
        self,
        managers: Sequence[GroupManager],
        states: StateManager,
        min_tokens: int,
        num_lookahead_tokens: int = 0,
    ) -> None:
        """`min_tokens`: a place is worth keeping when it saves so many."""
        self._states = states
        self._pages = next((manager for manager in managers if manager is not states), None)
        self._alignment = math.lcm(*(manager.block_size for manager in managers))
        self._min_tokens = min_tokens
        self._ends: dict[str, list[int]] = {}  # the places ahead of each request, the nearest first
        self.wanted: Callable[[Request], bool] = lambda request: False  # by a connector, of its answer
        # Each answer's next place, and the step that looks at it.
        self._passing: dict[str, tuple[int, int]] = {}
        self._apart = -(-min_tokens // self._alignment) * self._alignment
        # Which answers a step looks at: as far as one computes no more tokens in a step than this, it comes to no place before.
        self._due: defaultdict[int, list[str]] = defaultdict(list)
        self._step = 0
        self._most_tokens = 2 * num_lookahead_tokens + 1

    def begin(self, request: Request, num_hit_tokens: int) -> None:
        """The request is about to get its first blocks."""
        last = (request.num_tokens - 1) // self._alignment * self._alignment
        ends: list[int] = []
        if last - num_hit_tokens >= self._min_tokens:
            ends.append(last)
            parting = self._parting(request, last)
            if parting - num_hit_tokens >= self._min_tokens and last - parting >= self._min_tokens:
                ends.insert(0, parting)
        if ends:
            self._ends[request.request_id] = ends
        else:
            self._ends.pop(request.request_id, None)
        self._follow(request, last + self._apart if ends else request.num_tokens)

    def handed_over(self, request: Request, num_tokens: int) -> None:
        """The states after so many tokens came from the node that read them."""
        self._follow(request, num_tokens)

    def _follow(self, request: Request, num_tokens: int) -> None:
        """From the first place after so many tokens on."""
        self._passing.pop(request.request_id, None)
        if self.wanted(request):
            self._look(request.request_id, -(-num_tokens // self._alignment) * self._alignment, 0)

    def _look(self, request_id: str, place: int, tokens: int) -> None:
        """Again when it may have got so many more tokens."""
        step = self._step + max(-(-tokens // self._most_tokens), 1)
        self._passing[request_id] = place, step
        self._due[step].append(request_id)

    def loaded(self, request: Request, num_tokens: int) -> None:
        """A connector has brought the states after so many tokens, whole blocks of them: later prompts find them here."""
        self.begin(request, num_tokens)
        if num_tokens % self._alignment == 0:
            self._ends.setdefault(request.request_id, []).insert(0, num_tokens)

    def _parting(self, request: Request, max_tokens: int) -> int:
        if self._pages is None:
            return 0
        pages = self._pages.find_longest_hit(request.block_hashes, max_tokens, self._alignment)
        return len(pages) * self._pages.block_size

    def cap(self, request: Request, num_computed: int, num_new: int) -> int:
        """How many of the tokens the next step may compute, so that it ends at the next place."""
        for end in self._ends.get(request.request_id, ()):
            if end > num_computed:
                return min(num_new, end - num_computed)
        place, _ = self._passing.get(request.request_id, (0, 0))
        return min(num_new, place - num_computed) if place > num_computed else num_new

    def keep(
        self,
        requests: dict[str, Request],
        num_scheduled: dict[str, int],
        connector: SchedulerConnector | None = None,
    ) -> None:
        """The step is planned, and what it left of the pool is free. Requests that it takes beyond a place leave a checkpoint there,
        which the connector hears of."""
        for request_id in [name for name in self._ends if name in num_scheduled]:
            request, ends = requests[request_id], self._ends[request_id]
            computed = request.num_computed_tokens
            kept = self._states.keep_checkpoint(request, computed) if computed in ends else []
            if kept and connector is not None:
                connector.checkpoint_kept(request, computed, kept)
            left = [end for end in ends if end > computed]
            if left:
                self._ends[request_id] = left
            else:
                del self._ends[request_id]
        self._step += 1
        due = self._due.pop(self._step, None)
        if due and connector is not None:
            self._keep_passing(due, requests, num_scheduled, connector)

    def _keep_passing(
        self,
        due: Sequence[str],
        requests: dict[str, Request],
        num_scheduled: dict[str, int],
        connector: SchedulerConnector,
    ) -> None:
        kept = 0
        for request_id in due:
            place, step = self._passing.get(request_id, (0, 0))
            if step != self._step:
                continue  # it has begun again since
            request = requests.get(request_id)
            if request is None:  # it has ended, and a connector still reads its blocks
                del self._passing[request_id]
                continue
            computed = request.num_computed_tokens
            if computed == place and request_id in num_scheduled:
                blocks: list[int] = []
                if kept < MOST_PASSING and len(request.block_hashes) >= self._states.num_hashes(computed):
                    blocks = self._states.copy_states(request)
                if blocks:
                    connector.checkpoint_kept(request, computed, blocks, passing=True)
                    kept += 1
                place = computed + (self._apart if blocks else self._alignment)
            elif computed > place:
                place = (computed // self._alignment + 1) * self._alignment
            self._look(request_id, place, place - max(computed, request.num_tokens))

    def forget(self, request_id: str) -> None:
        self._ends.pop(request_id, None)
        self._passing.pop(request_id, None)
