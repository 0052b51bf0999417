"""What a step computes on the host, recorded once and played again on the very same tensors.

The CPU kernels take a piece of a layer in some microseconds. To walk through a model's modules in Python takes longer than that for
each of them, so a short step is recorded: torch's operations as torch dispatches them, and calls of the kernels as `call` makes them.
Views are no operations: they lie on tensors that stay where they are.

Whatever else the recorded work read from the host is frozen. What can be seen of that is refused (`CannotRecord`), and who
plays a tape compares its results with what the model says before they count (engine.model.recorded_steps).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.engine.model.native.forward import checked

# What they return depends on values, in its shape or altogether.
LOOKS = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero", "item"}
)
# What they make holds nothing yet.
_EMPTY = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"})
# They read a tensor's memory without an operation that torch would dispatch.
_READS = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})


class CannotRecord(RuntimeError):
    """The work looks at its own results, so it may go another way next time."""


class _Current(threading.local):
    tape: Tape | None = None


_current = _Current()


def call(function: Callable[..., int], arguments: tuple[Any, ...], tensors: tuple[torch.Tensor, ...]) -> None:
    """One of the CPU kernels. The arguments point into the tensors."""
    status = function(*arguments)
    if status != 0:
        checked(status)
    if _current.tape is not None:
        _current.tape.note(function, arguments, tensors)


class Tape:
    def __init__(self) -> None:
        self._calls: list[Callable[[], Any]] = []
        self._storages: dict[int, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """What its results take, which stay as long as the tape."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._storages.values())

    def record(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Does the work. Raises CannotRecord, and then the work may be half done."""
        _current.tape = self
        try:
            with _Reads(), _Operations(self):
                return work()
        finally:
            _current.tape = None

    def play(self) -> None:
        """Does it again: afterwards the tensors that it returned hold what it would return now."""
        for again in self._calls:
            again()

    def note(
        self, function: Callable[..., int], arguments: tuple[Any, ...], tensors: tuple[torch.Tensor, ...]
    ) -> None:
        def again() -> None:
            status = function(*arguments)
            if status != 0:
                checked(status)

        self._calls.append(again)
        self.keep(*tensors)

    def note_operation(self, again: Callable[[], Any]) -> None:
        self._calls.append(again)

    def keep(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            self._storages.setdefault(_storage(tensor), tensor)


class _Reads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS:
            raise CannotRecord(f"it reads values ({name})")
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        if name in LOOKS or (name.startswith("index") and _picks_by_mask(args)):
            raise CannotRecord(f"it looks at values ({name})")
        result = func(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        places = {_storage(t) for t in given}
        fresh = [
            t if isinstance(t, torch.Tensor) and t.numel() and _storage(t) not in places else None
            for t in tree_leaves(result)
        ]
        changes = any(
            argument.alias_info is not None and argument.alias_info.is_write
            for argument in func._schema.arguments
        )
        made = [t for t in fresh if t is not None]
        self._tape.keep(*made)
        if changes or (made and name not in _EMPTY):
            self._tape.note_operation(_again(func, args, kwargs, fresh, changes))
        return result


def _again(
    func: Any, args: Any, kwargs: dict[str, Any], fresh: list[torch.Tensor | None], changes: bool
) -> Callable[[], Any]:
    if changes and all(t is None for t in fresh):
        return lambda: func(*args, **kwargs)
    into = _out_variant(func) if len(fresh) == 1 else None
    if into is not None and not changes:
        target = fresh[0]
        return lambda: into(*args, **kwargs, out=target)

    def copied() -> None:
        for target, value in zip(fresh, tree_leaves(func(*args, **kwargs)), strict=True):
            if target is not None:
                target.copy_(value)

    return copied


def _out_variant(func: Any) -> Any | None:
    """The same operation with a place for its result."""
    packet, own = func.overloadpacket, func._schema.arguments
    for name in packet.overloads():
        variant = getattr(packet, name)
        arguments = variant._schema.arguments
        if [a.name for a in arguments] == [*(a.name for a in own), "out"] and all(
            str(a.type) == str(b.type) for a, b in zip(own, arguments, strict=False)
        ):
            return variant
    return None


def _picks_by_mask(args: Any) -> bool:
    return any(isinstance(t, torch.Tensor) and t.dtype == torch.bool for t in tree_leaves(args[1:2]))


def _storage(tensor: torch.Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place
