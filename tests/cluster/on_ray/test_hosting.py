"""The methods of a node's process, and how errors leave it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import pytest

from tandem.base.errors import ConfigurationError, DeadlineExceeded, InternalError, NodeLost, Unavailable
from tandem.cluster.on_ray.runtime import import_ray
from tandem.engine.config import EngineConfig, ModelConfig
from tandem.node.config import NodeConfig
from tandem.node.hosting import NodeHost
from tandem.wire.nodes import NodeInfo, Role
from tests.cluster.pools.helpers import PATIENCE_S

INFO = NodeInfo(
    node_id="decode-0", role=Role.DECODE, epoch=7, request_endpoint="tcp://h:1", peer_endpoint="", model="tiny",
    max_model_len=10, block_size=16,
)  # fmt: skip


class FakeNode:
    """What a host needs of a node."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.may_go_on = threading.Event()
        self.error: Exception | None = None
        self.stopped = False
        self.is_at_rest = True
        self.starts = 0
        self.served: dict[str, str] = {}
        self.step_s = 0.0

    def start(
        self,
        progress: Callable[[str, float], None],
        runner: object = None,
        *,
        model_folder: str | None = None,
        adapters: Mapping[str, str] | None = None,
        draft_folder: str | None = None,
        keepers: Sequence[str] = (),
    ) -> NodeInfo:
        self.starts += 1
        self.draft_folder = draft_folder
        self.model_folder, self.adapters = model_folder, adapters
        progress("loading", 0.5)
        if runner is None:
            assert self.may_go_on.wait(PATIENCE_S)
        else:
            assert runner == "the weights"
        if self.error is not None:
            raise self.error
        return msgspec.structs.replace(INFO, role=self.config.role, epoch=INFO.epoch + (runner is not None))

    def set_adapters(self, folders: Mapping[str, str], kept: Collection[str], timeout_s: float) -> dict[str, str]:
        """As a node does that takes changes between two steps, and is in a step of `step_s`."""
        self.served = {name: folder for name, folder in self.served.items() if name in kept} | dict(folders)
        if timeout_s < self.step_s:
            raise DeadlineExceeded("it is in a long step")
        return dict(self.served)

    def drain(self, timeout_s: float) -> bool:
        self.drained_with = timeout_s
        assert not self.stopped
        return self.is_at_rest

    def release(self) -> object:
        self.stopped = True
        return "the weights"

    def stop(self) -> None:
        self.stopped = True


def hosted_with(model: ModelConfig, *finders: Callable[..., str]) -> tuple[NodeHost, FakeNode]:
    made: list[FakeNode] = []

    def make(config: NodeConfig) -> FakeNode:
        made.append(FakeNode(config))
        return made[-1]

    config = NodeConfig(node_id="decode-0", role=Role.DECODE, engine=EngineConfig(model=model))
    return NodeHost(make, msgspec.msgpack.encode(config), *finders), made[0]  # type: ignore[arg-type]


@pytest.fixture
def host() -> tuple[NodeHost, FakeNode]:
    return hosted_with(ModelConfig(threads=3))


@pytest.fixture(autouse=True)
def _same_threads_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_start_answers_with_the_node_and_progress_can_be_followed(host: tuple[NodeHost, FakeNode]) -> None:
    hosted, node = host
    assert node.config.node_id == "decode-0"
    assert os.environ["OMP_NUM_THREADS"] == "3"
    answers: list[bytes] = []
    thread = threading.Thread(target=lambda: answers.append(hosted.start()))
    thread.start()
    assert hosted.progress_after(0, PATIENCE_S) == (1, "loading", 0.5)
    node.may_go_on.set()
    thread.join(PATIENCE_S)
    assert msgspec.msgpack.decode(answers[0], type=NodeInfo) == INFO


def test_our_errors_pass_and_foreign_ones_become_ours(host: tuple[NodeHost, FakeNode]) -> None:
    hosted, node = host
    node.may_go_on.set()
    node.error = ConfigurationError("no such model")
    with pytest.raises(ConfigurationError, match="no such model"):
        hosted.start()
    node.error = MemoryError("too much")
    with pytest.raises(InternalError, match="MemoryError: too much"):
        hosted.start()


@pytest.mark.parametrize("is_at_rest", [True, False])
def test_a_node_that_is_told_to_end_drains_before_it_stops(
    host: tuple[NodeHost, FakeNode], *, is_at_rest: bool
) -> None:
    hosted, node = host
    node.is_at_rest = is_at_rest
    hosted.finish()
    assert node.drained_with == node.config.timeouts.drain_s
    assert node.stopped
    assert hosted.hold(0.001)


def test_a_change_of_adapters_that_waits_for_a_long_step_is_undone_like_any_other(
    host: tuple[NodeHost, FakeNode],
) -> None:
    hosted, node = host
    before = {"law": "/old", "sql": "/sql"}
    assert hosted.set_adapters(before, 1.0) == before
    node.step_s = 2.0
    with pytest.raises(DeadlineExceeded):
        hosted.set_adapters({"law": "/new"}, 1.0)
    assert node.served == {"law": "/new"}, "the step has ended, and so the change was made"
    assert hosted.set_adapters(before, 5.0) == before
    assert node.served == before


def test_hold_ends_when_the_node_is_stopped(host: tuple[NodeHost, FakeNode]) -> None:
    hosted, node = host
    assert not hosted.hold(0.001), "no caller is kept for longer than it asked for"
    held: list[bool] = []
    thread = threading.Thread(target=lambda: held.append(hosted.hold(PATIENCE_S)))
    thread.start()
    hosted.stop()
    thread.join(PATIENCE_S)
    assert held == [True]
    assert node.stopped


@pytest.mark.parametrize(("draft", "found"), [("me/small", "/here/me/small"), ("mtp", None)])
def test_a_node_looks_for_its_model_where_it_runs(draft: str, found: str | None) -> None:
    def find(name: str, report: Callable[[str, float], None]) -> str:
        report(f"fetching {name}", 0.5)
        return f"/here/{name}"

    model = ModelConfig(path="smollm2", adapters={"sql": "me/sql"}, draft=draft)
    hosted, node = hosted_with(model, find, lambda name, where, report: f"/here/{name}/{where}")
    node.may_go_on.set()
    hosted.start()
    assert (node.model_folder, node.adapters) == ("/here/smollm2", {"sql": "/here/sql/me/sql"})
    assert node.draft_folder == found
    assert hosted.progress_after(0, PATIENCE_S)[0] == 2 + bool(found), "fetching each, then loading"


def test_who_asks_again_whether_it_has_started_gets_the_same_answer(host: tuple[NodeHost, FakeNode]) -> None:
    hosted, node = host
    node.may_go_on.set()
    assert hosted.start() == hosted.start()
    assert node.starts == 1
    assert msgspec.msgpack.decode(hosted.configuration(), type=NodeConfig) == node.config


def test_a_node_becomes_another_with_the_weights_that_it_has_unless_it_has_work(
    host: tuple[NodeHost, FakeNode],
) -> None:
    hosted, node = host
    node.may_go_on.set()
    hosted.start()
    as_prefill = msgspec.msgpack.encode(NodeConfig(node_id="decode-0", role=Role.PREFILL))
    node.is_at_rest = False
    with pytest.raises(Unavailable, match="still has work"):
        hosted.change_role(as_prefill)
    assert not node.stopped
    node.is_at_rest = True
    info = msgspec.msgpack.decode(hosted.change_role(as_prefill), type=NodeInfo)
    assert (info.node_id, info.role, info.epoch) == ("decode-0", Role.PREFILL, INFO.epoch + 1)
    assert node.stopped, "there are never two"
    assert msgspec.msgpack.decode(hosted.start(), type=NodeInfo) == info, "that is what it is from now on"


@pytest.mark.slow
def test_every_error_of_ray_becomes_one_of_ours() -> None:
    """Slow: imports Ray. Starts nothing."""
    import_ray()
    from ray import exceptions

    from tandem.cluster.on_ray.errors import translated

    def failed(cause: Exception) -> exceptions.RayTaskError:
        return exceptions.RayTaskError("start", "traceback", cause)

    ours = ConfigurationError("no such model")
    assert translated(failed(ours)) is ours
    assert str(translated(failed(ValueError("x")))) == "ValueError: x"
    assert isinstance(translated(exceptions.ActorDiedError()), NodeLost)
    broken = "The actor is temporarily unavailable: RpcError: RPC error: Socket closed rpc_code: 14. The task may or may not have run."
    unreached = translated(exceptions.ActorUnavailableError(broken, b"a" * 16))
    assert str(unreached) == "its process cannot be reached: Socket closed"
    assert str(translated(exceptions.GetTimeoutError("late"))) == "Ray: GetTimeoutError: late"
