"""Decides after which tokens a request's recurrent states are kept as a checkpoint, for later prompts or for a connector.

A checkpoint is a hit only for prompts that share exactly the tokens before it, and a step must end there. So each one costs its
prompt a step, and the pool some blocks. Two places in a prompt are worth that:

- the last block boundary before the prompt's end, where the conversation's next turn goes on;
- the end of what it shares with an earlier prompt: attention blocks of the same tokens are cached up to there, but no state. If
  two prompts begin alike, a third is likely to. (A model without attention has no blocks that would show it.)

A third place costs no step: the end of a connector's load, because computing begins from the states there.

While a request decodes, no later prompt needs its states, but a connector that mirrors it to another node may. Those
checkpoints are kept while the connector reads them, `min_tokens` apart, and for few requests in one step; the others are tried
again a block later.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from tandem.engine.cache.group_manager import GroupManager
from tandem.engine.cache.states.tables import StateManager
from tandem.engine.request import Request
from tandem.kvtransfer.base import SchedulerConnector

# At most this many decoding requests get a checkpoint in one step, because each copy makes the step longer.
MOST_PASSING = 2


class Checkpoints:
    """See engine.cache.wings.StateCheckpoints."""

    def __init__(
        self, managers: Sequence[GroupManager], states: StateManager, min_tokens: int, num_lookahead_tokens: int = 0
    ) -> None:
        """`min_tokens` is the fewest tokens that a checkpoint must save a later prompt."""
        self._states = states
        self._pages = next((manager for manager in managers if manager is not states), None)
        self._alignment = math.lcm(*(manager.block_size for manager in managers))
        self._min_tokens = min_tokens
        # The places ahead of each request in its prompt, the nearest first.
        self._ends: dict[str, list[int]] = {}
        self.wanted: Callable[[Request], bool] = lambda request: False
        # Each such request's next place, and the step that checks whether it is reached.
        self._passing: dict[str, tuple[int, int]] = {}
        self._apart = -(-min_tokens // self._alignment) * self._alignment
        # The requests to check, by step. A decoding request gets at most `_most_tokens` tokens in a step, so it reaches its
        # place no earlier.
        self._due: defaultdict[int, list[str]] = defaultdict(list)
        self._step = 0
        self._most_tokens = 2 * num_lookahead_tokens + 1

    def begin(self, request: Request, num_hit_tokens: int) -> None:
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
        self._follow(request, num_tokens)

    def _follow(self, request: Request, num_tokens: int) -> None:
        """Follows a request that a connector wants checkpoints of, from the first place after `num_tokens` tokens."""
        self._passing.pop(request.request_id, None)
        if self.wanted(request):
            self._look(request.request_id, -(-num_tokens // self._alignment) * self._alignment, 0)

    def _look(self, request_id: str, place: int, tokens: int) -> None:
        """Checks the request again in the first step after which it may have `tokens` more tokens."""
        step = self._step + max(-(-tokens // self._most_tokens), 1)
        self._passing[request_id] = place, step
        self._due[step].append(request_id)

    def loaded(self, request: Request, num_tokens: int) -> None:
        self.begin(request, num_tokens)
        if num_tokens % self._alignment == 0:
            self._ends.setdefault(request.request_id, []).insert(0, num_tokens)

    def _parting(self, request: Request, max_tokens: int) -> int:
        if self._pages is None:
            return 0
        pages = self._pages.find_longest_hit(request.block_hashes, max_tokens, self._alignment)
        return len(pages) * self._pages.block_size

    def cap(self, request: Request, num_computed: int, num_new: int) -> int:
        for end in self._ends.get(request.request_id, ()):
            if end > num_computed:
                return min(num_new, end - num_computed)
        place, _ = self._passing.get(request.request_id, (0, 0))
        return min(num_new, place - num_computed) if place > num_computed else num_new

    def keep(
        self, requests: dict[str, Request], num_scheduled: dict[str, int], connector: SchedulerConnector | None = None
    ) -> None:
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
                continue  # the request began again, and another step checks it
            request = requests.get(request_id)
            if request is None:  # it has ended, and is held for its connector
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
