"""A fake asynchronous device on a CPU: streams, events, page-locked copies and graphs.

The device's tensors are wrappers. An operation on them is queued in a stream, and runs when something waits for it or at a random
moment; a copy from page-locked memory reads that memory only then. Only events order streams among each other. So memory that an engine
frees, overwrites or reads too early shows in its results. Work outside all streams (a peer's writes into the cache) goes to
`memory(tensor)` directly, as with RDMA.

`present` belongs to one thread, but patches `torch.cuda` for all. Another thread that works with the device's tensors must use
`in_thread` meanwhile.

Each operation also runs at once on shadows of its tensors, to learn the result's shape. Shadows serve no other purpose.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

CUDA = torch.device("cuda:0")
_READS = {"tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"}
_INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_"}
_LOOKS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select"}


class DeviceTensor(torch.Tensor):
    """A tensor of the device. `shadow` has its shape; `box` holds its memory once the device has computed it."""

    shadow: torch.Tensor
    box: list[torch.Tensor]

    @staticmethod
    def __new__(cls, shadow: torch.Tensor, box: list[torch.Tensor]) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls, shadow.size(), strides=shadow.stride(), storage_offset=shadow.storage_offset(), dtype=shadow.dtype
        )
        made.shadow, made.box = shadow, box
        return made

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a tensor of a device that is not there any more")

    __torch_function__ = torch._C._disabled_torch_function_impl

    def data_ptr(self) -> int:  # the address of the device's memory, for code that writes to it directly
        return (self.box[0] if self.box else self.shadow).data_ptr()

    def get_device(self) -> int:
        return 0


class Line:
    """The work of one stream, in order."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._work: deque[Callable[[], None] | tuple[Line, int]] = deque()
        self.given = self.done = 0

    def add(self, work: Callable[[], None] | tuple[Line, int]) -> None:
        """Queues work, or a wait for a place in another line."""
        self._work.append(work)
        self.given += 1

    def run_until(self, place: int) -> None:
        while self.done < place:
            work = self._work.popleft()
            if isinstance(work, tuple):
                work[0].run_until(work[1])
            else:
                work()
            self.done += 1


class FakeDevice:
    """`pace`: the probability that some queued work runs when more is added, or when an event is queried. 0: work runs only when something
    waits for it."""

    def __init__(self, seed: int = 0, pace: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._current = threading.local()
        self.lock = threading.RLock()
        self.default = Line(self)
        self.lines = [self.default]
        self.pace = pace
        self.num_waits = 0
        self.waits: list[str] = []  # what the host waited for, and the function of ours that did
        self.operations: set[str] = set()  # the names of all operations so far
        self.made_bytes = 0
        self.emptied = False
        self.capability = 9, 0

    @property
    def making(self) -> bool:
        return getattr(self._current, "making", False)

    @making.setter
    def making(self, making: bool) -> None:
        self._current.making = making

    @property
    def recording(self) -> list[Callable[[], None]] | None:
        """The list that records this thread's work; None if it does not record. Other threads' work is not recorded."""
        return getattr(self._current, "recording", None)

    @recording.setter
    def recording(self, work: list[Callable[[], None]] | None) -> None:
        self._current.recording = work

    @property
    def line(self) -> Line:
        """The line of this thread's current stream."""
        return getattr(self._current, "line", self.default)

    @contextmanager
    def on_line(self, line: Line) -> Iterator[None]:
        before, self._current.line = self.line, line
        try:
            yield
        finally:
            self._current.line = before

    def enqueue(self, work: Callable[[], None]) -> None:
        if self.recording is not None:
            self.recording.append(work)
            return
        with self.lock:
            self.line.add(work)
            self.may_advance()

    def note_wait(self, why: str) -> None:
        """Notes the innermost function outside torch and the tests."""
        frame: Any = inspect.currentframe()
        while frame is not None and any(part in frame.f_code.co_filename for part in ("/torch/", "/tests/")):
            frame = frame.f_back
        if frame is not None:
            self.waits.append(f"{why}: {frame.f_code.co_filename.rsplit('/')[-1]} {frame.f_code.co_name}")

    def finish_line(self) -> None:
        """Runs all work of the current stream, as reading a value on the host does."""
        self.note_wait("a value")
        if self.recording is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.wait_until(self.line, self.line.given)

    def may_advance(self) -> None:
        """Lets the device run some queued work, at random."""
        if self.pace and self._random.random() < self.pace:
            line = self._random.choice(self.lines)
            line.run_until(self._random.randint(line.done, line.given))

    def empty(self) -> None:
        self.emptied = True

    def wait_until(self, line: Line, place: int) -> None:
        with self.lock:
            self.num_waits += 1
            line.run_until(place)

    def synchronize(self) -> None:
        with self.lock:
            self.num_waits += 1
            for line in self.lines:
                line.run_until(line.given)

    @contextmanager
    def present(self) -> Iterator[FakeDevice]:
        """Within the block, `cuda:0` is this device, for torch and for callers of torch.cuda."""
        with _Patched(self), self.in_thread():
            yield self

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        with _Functions(self), _Operations(self):
            yield


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """The content of the device's memory now."""
    assert isinstance(tensor, DeviceTensor)
    return tensor.box[0]


class _Operations(TorchDispatchMode):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._device.lock:
            return self._dispatched(func, args, kwargs or {})

    def _dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        if not self._device.making and not any(isinstance(leaf, DeviceTensor) for leaf in leaves):
            return func(*args, **kwargs)
        name = func.__name__.split(".")[0]
        if name == "detach":
            return leaves[0]
        if name in _LOOKS:
            self._device.finish_line()
            real = tree_map(lambda leaf: memory(leaf) if isinstance(leaf, DeviceTensor) else leaf, leaves)
            args, kwargs = tree_unflatten(real, spec)
            found = func(*args, **kwargs)
            return DeviceTensor(found, [found]) if isinstance(found, torch.Tensor) else found
        return self._later(func, leaves, spec, name)

    def _later(self, func: Any, leaves: list[Any], spec: Any, name: str) -> Any:
        if name in _INDEXES and any(_is_of_host(leaf) for leaf in leaves[1:]):
            self._device.note_wait("an index on the host")
        target = leaves[0] if name == "copy_" else None
        blocking = name == "copy_" and True not in leaves[2:]
        to_host = target is not None and not isinstance(target, DeviceTensor)
        if to_host and blocking:
            self._device.finish_line()
            assert isinstance(target, torch.Tensor)
            return target.copy_(memory(leaves[1]))
        if blocking and _is_of_host(leaves[1]):
            self._device.note_wait("ordinary memory")
        self._device.operations.add(name)
        # A copy reads ordinary host memory before the call returns, and page-locked memory when it runs.
        late = leaves
        if not (name == "copy_" and not blocking):
            late = [_frozen(leaf) for leaf in leaves]
        if to_host:
            source = leaves[1]
            assert isinstance(target, torch.Tensor)

            def land() -> None:
                target.copy_(memory(source))

            self._device.enqueue(land)
            return target
        if name == "histc":
            func = _counted_on_a_device(func)
        shadows = [leaf.shadow if isinstance(leaf, DeviceTensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(shadows, spec)
        shadow_out = func(*args, **kwargs)
        owners = {id(leaf.shadow): leaf for leaf in leaves if isinstance(leaf, DeviceTensor)}
        outs, out_spec = tree_flatten(shadow_out)
        made: list[Any] = []
        for out in outs:
            if not isinstance(out, torch.Tensor):
                made.append(out)
            elif id(out) in owners:
                made.append(owners[id(out)])
            else:
                self._device.made_bytes += out.numel() * out.element_size()
                made.append(DeviceTensor(out, []))

        def run() -> None:
            real = [memory(leaf) if isinstance(leaf, DeviceTensor) else leaf for leaf in late]
            args, kwargs = tree_unflatten(real, spec)
            for wrapper, result in zip(made, tree_flatten(func(*args, **kwargs))[0], strict=True):
                if isinstance(wrapper, DeviceTensor) and id(wrapper.shadow) not in owners:
                    wrapper.box[:] = [result]

        self._device.enqueue(run)
        return tree_unflatten(made, out_spec)


def _counted_on_a_device(func: Any) -> Any:
    """A CPU counts no integers, which a GPU does."""
    return lambda given, *args, **kwargs: func(given.float(), *args, **kwargs).to(given.dtype)


def _is_of_host(leaf: Any) -> bool:
    """A tensor that a real device copies from the host, unlike a number that is passed with a kernel's arguments."""
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, DeviceTensor) and leaf.dim() > 0


def _frozen(leaf: Any) -> Any:
    is_host = isinstance(leaf, torch.Tensor) and not isinstance(leaf, DeviceTensor)
    # Weights never change, so they need not be copied for each operation.
    return leaf.clone() if is_host and leaf.numel() < 4096 and not isinstance(leaf, torch.nn.Parameter) else leaf


class _Functions(TorchFunctionMode):
    """Handles the functions that name a device or read values, before they become operations."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        pinned = kwargs.pop("pin_memory", False)
        assert not (pinned and _is_cuda(kwargs.get("device")))
        if name == "pin_memory":
            return args[0].clone()
        if name in _READS and isinstance(args[0], DeviceTensor):
            self._device.finish_line()
            return func(memory(args[0]), *args[1:], **kwargs)
        if name in ("to", "cpu", "cuda") and isinstance(args[0], torch.Tensor):
            moved = self._moved(name, args, kwargs)
            if moved is not None:
                return moved
        if _is_cuda(kwargs.get("device")):
            kwargs.pop("device")
            with self._making():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def _making(self) -> Iterator[None]:
        before, self._device.making = self._device.making, True
        try:
            yield
        finally:
            self._device.making = before

    def _moved(self, name: str, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
        tensor: torch.Tensor = args[0]
        wanted = kwargs.get("device", args[1] if len(args) > 1 else None)
        to_device = name == "cuda" or _is_cuda(wanted)
        to_host = name == "cpu" or _is_host(wanted)
        on_device = isinstance(tensor, DeviceTensor)
        if to_host and on_device:
            self._device.finish_line()
            return memory(tensor).clone()
        if to_device and not on_device:
            with self._making():
                copy = torch.empty_like(tensor)
            return copy.copy_(tensor, non_blocking=bool(kwargs.get("non_blocking", False)))
        return tensor if to_device and on_device else None


def _is_cuda(device: Any) -> bool:
    return isinstance(device, torch.device | str) and torch.device(device).type == "cuda"


def _is_host(device: Any) -> bool:
    return device == "cpu" or (isinstance(device, torch.device) and device.type == "cpu")


class _Event:
    def __init__(self, device: FakeDevice, **_: Any) -> None:
        self._device = device
        self.line, self.place = device.default, 0

    def record(self, stream: Any = None) -> None:
        with self._device.lock:
            self.line = self._device.line if stream is None else stream.line
            self.place = self.line.given

    def query(self) -> bool:
        with self._device.lock:
            self._device.may_advance()
            return self.line.done >= self.place

    def synchronize(self) -> None:
        self._device.note_wait("an event")
        self._device.wait_until(self.line, self.place)


class _Stream:
    device = CUDA

    def __init__(self, device: FakeDevice, line: Line | None = None) -> None:
        self._device = device
        if line is None:
            line = Line(device)
            device.lines.append(line)
        self.line = line

    def wait_stream(self, other: _Stream) -> None:
        with self._device.lock:
            self.line.add((other.line, other.line.given))

    def wait_event(self, event: _Event) -> None:
        with self._device.lock:
            self.line.add((event.line, event.place))

    def synchronize(self) -> None:
        self._device.wait_until(self.line, self.line.given)


class _Graph:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.work: list[Callable[[], None]] = []

    def replay(self) -> None:
        for work in self.work:
            self._device.enqueue(work)


class _Patched:
    def __init__(self, device: FakeDevice) -> None:

        def registered(*_: Any) -> int:
            return 0

        @contextmanager
        def graph(graph: _Graph, **_: Any) -> Iterator[None]:
            device.recording = graph.work
            try:
                yield
            finally:
                device.recording = None

        self._names: dict[str, Any] = {
            "Event": lambda **options: _Event(device, **options),
            "Stream": lambda *_: _Stream(device),
            "current_stream": lambda *_: _Stream(device, device.line),
            "stream": lambda stream: device.on_line(stream.line),
            "cudart": lambda: SimpleNamespace(cudaHostRegister=registered, cudaHostUnregister=registered),
            "device": lambda *_: nullcontext(),
            "synchronize": lambda *_: device.synchronize(),
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_capability": lambda *_: device.capability,
            "get_device_properties": lambda *_: SimpleNamespace(
                name="none",
                major=device.capability[0],
                minor=device.capability[1],
                multi_processor_count=132,
                total_memory=1 << 37,
            ),
            "CUDAGraph": lambda: _Graph(device),
            "graph": graph,
            "graph_pool_handle": lambda: object(),
            "set_device": lambda *_: None,
            "empty_cache": device.empty,
            # The fake allocator never frees, so count the allocations since the last call.
            "reset_peak_memory_stats": lambda *_: None,
            "memory_allocated": lambda *_: 0,
            "max_memory_allocated": lambda *_: device.made_bytes,
        }
        self._before: dict[str, Any] = {}

    def __enter__(self) -> None:
        for name, value in self._names.items():
            self._before[name] = getattr(torch.cuda, name)
            setattr(torch.cuda, name, value)

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            setattr(torch.cuda, name, value)
