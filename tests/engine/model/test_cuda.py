"""Code for CUDA, as far as it can be tested without it: the device and stream of each call, and what stays allocated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tandem.engine.model import torch_runner
from tandem.engine.model.cuda.decode_graphs import CudaRecorder
from tandem.engine.model.cuda.step_memory import peak_of_step
from tandem.engine.model.general import load_model
from tandem.engine.model.source import find_source
from tandem.engine.model.staging import on
from tests.engine.model import tiny
from tests.engine.model.driver import load
from tests.engine.model.fake_device import CUDA, FakeDevice
from tests.engine.model.test_loading import greedy


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.device = torch.device(device or "cuda:0")
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


class FakeCuda:
    """One current stream, and torch's manners: recording ends with an error where it failed, and then its stream stays
    the current one."""

    def __init__(self) -> None:
        self.current = self.default = Stream("cuda:1")
        self.recorded_on: list[Stream] = []
        self.pools: list[object] = []
        self.fails = False
        self.Stream = Stream
        self.CUDAGraph = type("CUDAGraph", (), {"replay": lambda self: None})

    def graph_pool_handle(self) -> object:
        return "pool"

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(
        self, graph: Any, pool: object, stream: Stream | None = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        before, self.current = self.current, stream or Stream()
        self.recorded_on.append(self.current)
        self.pools.append(pool)
        assert capture_error_mode == "thread_local"
        yield
        if self.fails:
            raise RuntimeError("the recording was invalidated")
        self.current = before


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr("tandem.engine.model.cuda.decode_graphs.torch.cuda", fake)
    return fake


def test_all_are_recorded_on_one_stream_of_the_models_own_device(fake: FakeCuda) -> None:
    recorder = CudaRecorder(torch.device("cuda:1"))
    ran_on: list[Stream] = []

    def work() -> torch.Tensor:
        ran_on.append(fake.current)
        return torch.zeros(1)

    for _ in range(2):
        recorder(work)
    (stream,) = set(fake.recorded_on)
    assert stream.device == torch.device("cuda:1")
    assert stream is not fake.default
    assert set(ran_on) == {stream}
    assert len(ran_on) > len(fake.recorded_on)  # it is warmed up before
    assert stream.waited_for == [fake.default] * 2
    assert fake.default.waited_for == [stream] * 2
    assert fake.pools == ["pool", "pool"]


def test_the_current_stream_comes_back_where_work_cannot_be_recorded(fake: FakeCuda) -> None:
    recorder = CudaRecorder(torch.device("cuda:1"))
    fake.fails = True
    with pytest.raises(RuntimeError, match="invalidated"):
        recorder(lambda: torch.zeros(1))
    assert fake.current is fake.default


def test_a_step_is_started_on_the_models_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the one that happens to be current in the thread, where libraries would launch their kernels."""
    entered: list[object] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    with on(torch.device("cpu")):
        assert not entered
    with on(torch.device("cuda:1")):
        assert entered == [torch.device("cuda:1")]
    current: list[torch.device] = []

    @contextmanager
    def recorded(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.clear()

    monkeypatch.setattr(torch_runner, "on", recorded)
    runner = load(tiny.save("llama", tmp_path), native=False)
    forward, seen = runner.forward, []
    runner.forward = lambda batch, hooks: seen.append(list(current)) or forward(batch, hooks)
    greedy(runner, 2)
    assert seen == [[torch.device("cpu")]] * 2


def test_a_step_is_measured_on_the_device(tmp_path: Path) -> None:
    """Every module runs, logits are computed for the rows that are sampled, and nothing stays."""
    llama = tiny.save("llama", tmp_path)
    model = load_model(
        find_source(str(llama)),
        transformers.AutoConfig.from_pretrained(llama),
        torch.float32,
        torch.device("cpu"),
        lambda *_: None,
    )
    device = FakeDevice()
    with device.present():
        assert peak_of_step(model, 24, 3, CUDA) > 0
    assert {"embedding", "linear"} <= device.operations
    assert device.emptied
