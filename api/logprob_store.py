"""The log-probabilities of an answer's tokens, as numbers in arrays, which take a twelfth of the memory of
objects."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

from tandem.wire.sampling import TokenLogprobs

_FORGET_AT_ONCE = 1024


class LogprobStore(Sequence[TokenLogprobs]):
    """One row per output token: the token itself, then its alternatives. Indices count from the output's
    first token, even after the first rows were forgotten."""

    def __init__(self, rows: Iterable[TokenLogprobs] = ()) -> None:
        self._ids = array("q")
        self._values = array("d")
        self._ranks = array("q")
        # Where each row ends in ids and values, counted from the first row ever stored.
        self._ends = array("q")
        self._forgotten = 0  # rows
        self._base = 0  # where the first kept row begins
        self.extend(rows)

    def extend(self, rows: Iterable[TokenLogprobs]) -> None:
        ids, values = self._ids, self._values
        for row in rows:
            ids.append(row.token_id)
            values.append(row.logprob)
            for token_id, logprob in row.top:
                ids.append(token_id)
                values.append(logprob)
            self._ranks.append(row.rank)
            self._ends.append(self._base + len(ids))

    def __len__(self) -> int:
        return self._forgotten + len(self._ends)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobs]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | list[TokenLogprobs]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = index if index >= 0 else len(self) + index
        if not 0 <= at < len(self):
            raise IndexError(f"token {index} of {len(self)}")
        ids, values = self.row(at)
        top = list(zip(ids[1:], values[1:], strict=True))
        return TokenLogprobs(ids[0], values[0], self._ranks[at - self._forgotten], top)

    def row(self, index: int) -> tuple[Sequence[int], Sequence[float]]:
        """Returns the ids and log-probabilities of one token and its alternatives."""
        at = index - self._forgotten
        if at < 0:
            raise IndexError(f"token {index} has been forgotten")
        begin = (self._ends[at - 1] if at else self._base) - self._base
        end = self._ends[at] - self._base
        return self._ids[begin:end], self._values[begin:end]

    def mean(self, count: int) -> float:
        """Returns the mean of the first `count` tokens' own log-probabilities."""
        begins = [self._base, *self._ends[: max(0, count - 1)]][:count]
        return sum(self._values[begin - self._base] for begin in begins) / max(1, len(begins))

    def forget(self, before: int) -> None:
        """Frees the rows before this index, in batches of at least _FORGET_AT_ONCE. The caller must not read
        them again."""
        before = min(before, len(self))
        count = before - self._forgotten
        if count < _FORGET_AT_ONCE:
            return
        end = self._ends[count - 1]
        del self._ids[: end - self._base]
        del self._values[: end - self._base]
        del self._ranks[:count]
        del self._ends[:count]
        self._forgotten, self._base = before, end

    @property
    def nbytes(self) -> int:
        return 8 * (len(self._ids) + len(self._values) + len(self._ranks) + len(self._ends))
