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
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        # Libraries choose kernels and allocate on their first calls, which must not be recorded.
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may use the device meanwhile: a connector's, for one.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        return graph.replay, result
