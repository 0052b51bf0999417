"""Records a step's work on a CPU once, and replays it on the same tensors.

A CPU kernel computes its piece of a layer in microseconds. Walking through a model's modules in Python takes longer than that for
each of them, so a short step is recorded: torch's operations as torch dispatches them, and calls of the kernels as `call` makes
them. Views need no recording, because the tensors that they view stay where they are.

Whatever else the work read on the host is frozen in the recording. Reads of values that can be detected are refused
(`CannotRecord`). For the others, the caller compares a tape's results with the model's before it uses them
(engine.model.fused.recorded_steps).
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

# The result of these operations, or its shape, depends on values.
LOOKS = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero", "item"}
)
# These make tensors without content.
_EMPTY = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"})
# These read a tensor's memory without an operation that torch dispatches.
_READS = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})


class CannotRecord(RuntimeError):
    """The work reads its own results, so another run may take another path."""


class _Current(threading.local):
    tape: Tape | None = None


_current = _Current()


def call(function: Callable[..., int], arguments: tuple[Any, ...], tensors: tuple[torch.Tensor, ...]) -> None:
    """Calls a CPU kernel, and records the call if a tape is recording. `arguments` point into `tensors`, which the tape keeps."""
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
        """The memory of the tape's intermediate results, which live as long as the tape."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._storages.values())

    def record(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Runs the work and records it. Raises CannotRecord, possibly in the middle of the work."""
        _current.tape = self
        try:
            with _Reads(), _Operations(self):
                return work()
        finally:
            _current.tape = None

    def play(self) -> None:
        """Runs the recorded work again. Its results are then in the tensors that `record` returned."""
        for again in self._calls:
            again()

    def note(self, function: Callable[..., int], arguments: tuple[Any, ...], tensors: tuple[torch.Tensor, ...]) -> None:
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
            argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments
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
    """The same operation's variant with an `out` argument; None without one."""
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
