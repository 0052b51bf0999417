"""What only CUDA has: graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch

_WARM_UPS = 2


class CudaRecorder:
    """Records work as a CUDA graph. All graphs of one recorder share their memory: only the latest replay's
    results are whole."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # On this device, and one for all: torch's own would be on whichever device is current, and record nothing of
        # this one's; and graphs that share memory are to be recorded on the same stream.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        current = torch.cuda.current_stream(self._device)
        # Libraries choose kernels and allocate on their first calls, which must not be recorded.
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Where work cannot be recorded, torch leaves the recording's stream the current one. The outer stream is what
        # comes back then. Other threads of this process may use the device meanwhile: a connector's, for one.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            result = work()
        return graph.replay, result
