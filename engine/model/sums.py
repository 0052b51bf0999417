"""Sums that are put off until a norm takes them: it adds up while it reads, in one launch instead of two.

Layers add to a residual in their own code, `residual + result`. Results that were marked as a `Summand` make a `PutOffSum` there, whose
memory is not written yet. The norm that gets it next takes its two parts. Whatever else looks at it, finds the sum: it is computed then.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch

# The same function has two names where a model writes `+` and where it writes `torch.add`.
ADDITIONS = frozenset((torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch.add))


def drops_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it is a dropout that returns what it gets, as all do that are not training."""
    return func is torch.nn.functional.dropout and not (args[2] if len(args) > 2 else kwargs.get("training", True))


class _Marked(torch.Tensor):
    """An ordinary tensor's memory under another type, by which torch tells us what is done with it."""

    plain: torch.Tensor

    @classmethod
    def of(cls, plain: torch.Tensor) -> Self:
        marked = plain.as_subclass(cls)
        marked.plain = plain
        return marked

    def read(self) -> torch.Tensor:
        """The ordinary tensor, for any use."""
        return self.plain

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if drops_nothing(func, args, kwargs or {}):
            return args[0]
        if func in ADDITIONS and not kwargs and len(args) == 2:
            one, other = args
            if _may_wait(one, other):
                return PutOffSum.of_parts(_ordinary(one), _ordinary(other))
        return func(*_ordinary(args), **_ordinary(kwargs or {}))


class Summand(_Marked):
    """A result that is added to a residual."""


class Parts(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor
    total: torch.Tensor  # where the sum goes


class PutOffSum(_Marked):
    _parts: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of_parts(cls, one: torch.Tensor, other: torch.Tensor) -> PutOffSum:
        made = cls.of(torch.empty_like(one, memory_format=torch.contiguous_format))
        made._parts = one, other
        return made

    def take_parts(self) -> Parts | None:
        """The parts for a caller who writes their sum to `total` at once; None if it is there."""
        parts, self._parts = self._parts, None
        return None if parts is None else Parts(*parts, self.plain)

    def read(self) -> torch.Tensor:
        if (parts := self.take_parts()) is not None:
            torch.add(parts.one, parts.other, out=parts.total)
        return self.plain


def _may_wait(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if not isinstance(one, Summand) and not isinstance(other, Summand):
        return False
    mine, theirs = (each.plain if isinstance(each, _Marked) else each for each in (one, other))
    return mine.shape == theirs.shape and mine.dtype == theirs.dtype and mine.device == theirs.device


def _ordinary(value: Any) -> Any:
    if isinstance(value, _Marked):
        return value.read()
    if type(value) in (tuple, list):
        return type(value)(map(_ordinary, value))
    if type(value) is dict:
        return {key: _ordinary(each) for key, each in value.items()}
    return value


def take_sum(x: torch.Tensor) -> Parts | None:
    """The parts of a sum that was put off; None for any other tensor. See PutOffSum.take_parts."""
    return x.take_parts() if isinstance(x, PutOffSum) else None
