"""`tandem apply`: its output before, during and after the replacement of nodes."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import msgspec
import pytest

from tandem.base.errors import ConfigurationError, DeadlineExceeded, NodeLost, TandemError, Unavailable
from tandem.cluster.cli import main
from tandem.cluster.commands import operate
from tandem.cluster.commands.address import WhichCluster
from tandem.cluster.commands.apply import apply, described, follow, follow_exchange
from tandem.cluster.commands.overview import rollout_line
from tandem.cluster.config import TandemConfig
from tandem.cluster.control import (
    AppliedChange,
    ClusterView,
    ControllerDecision,
    ExchangePhase,
    ExchangeView,
    RolloutView,
    SupervisedNode,
)
from tandem.wire.nodes import Role
from tests.cluster.direct_cluster import DirectCluster
from tests.cluster.pools.helpers import FakeClock

NODES = [SupervisedNode("decode-1", Role.DECODE, "10.0.0.2", "ready", "", 0)]


def view(rollout: RolloutView | None, revision: int = 4, *said: str) -> ClusterView:
    decisions = [ControllerDecision(100.0 + at, text) for at, text in enumerate(said)]
    return ClusterView("model", [], NODES, [], decisions, revision=revision, rollout=rollout)


class Told(DirectCluster):
    """A cluster that says one thing after another."""

    def __init__(self, *views: ClusterView | TandemError) -> None:
        self._views = list(views)
        self.is_going_back = False

    async def view(self) -> ClusterView:
        told = self._views.pop(0)
        if isinstance(told, TandemError):
            raise told
        return told

    async def go_back(self) -> None:
        self.is_going_back = True


class Answers:
    """What requests are found to be answered during a rollout."""

    compared = "no client's request was compared"

    def __init__(self, *found: str) -> None:
        self._found = list(found)

    def learn(self) -> int:
        return 1

    def ask_next(self) -> str:
        return self._found.pop(0)

    ask_all = ask_next

    def close(self) -> None: ...


class NoTime(FakeClock):
    async def sleep(self, seconds: float) -> None:
        self.stand_still(seconds)
        await asyncio.sleep(0)


def followed(
    cluster: Told | tuple[ClusterView | TandemError, ...], judge: Answers | None = None
) -> tuple[bool, list[str]]:
    said: list[str] = []
    cluster = Told(*cluster) if isinstance(cluster, tuple) else cluster
    return asyncio.run(follow(cluster, 4, said.append, NoTime(), judge=judge)), said  # type: ignore[arg-type]


UNDER_WAY = RolloutView(4, 1, ["decode-0"], 100.0)


def test_it_says_what_would_change_without_values() -> None:
    change = AppliedChange(["slo.ttft_s"], ["model.path"], ["router.port"], ["decode-0", "decode-1"], 1)
    assert list(described(change, dry_run=True)) == [
        "would be applied at once: slo.ttft_s",
        "nodes read when they start: model.path",
        "would be replaced, one after another: decode-0, decode-1",
        "not changed: router.port needs `tandem down`, then `tandem serve`",
    ]
    assert list(described(AppliedChange([], [], [], [], 1), dry_run=False)) == ["nothing is different"]


def test_it_follows_a_rollout_to_its_end_past_a_controller_that_was_away() -> None:
    views = (
        view(UNDER_WAY, 4, "rollout 4 begins"),
        view(UNDER_WAY, 4, "rollout 4 begins", "decode-0 drains and is replaced"),
        Unavailable("no controller"),
        DeadlineExceeded("no answer within 30 s"),
        view(None),
    )
    assert followed(views) == (
        True,
        [
            "1 new serve, 1 old left (decode-0)",
            "decode-0 drains and is replaced",
            "the controller is away, and what serves goes on: no controller",
            "done: 1 node and 0 routers serve with this configuration",
        ],
    )


def test_it_says_why_a_rollout_was_taken_back() -> None:
    back = RolloutView(3, 1, ["decode-1"], 100.0, going_back="decode-1: no weights")
    taken_back = "the rollout was taken back: decode-1: no weights"
    said = ["going back (decode-1: no weights): 1 new serve, 1 old left (decode-1)", taken_back]
    assert followed((view(back, 3), view(None, 3, "x", taken_back))) == (False, said)


@pytest.mark.parametrize(
    ("found", "taken_back", "last"),
    [
        (["", "", ""], False, "same bits as before"),
        (["", "token 3"], True, "done: 1 node and 0 routers serve with this configuration"),
        (["", "", "token 3"], False, "other bits: token 3. The rollout is done: apply the previous configuration to take it back"),
    ],
)  # fmt: skip
def test_an_answer_with_other_bits_takes_a_rollout_back(found: list[str], taken_back: bool, last: str) -> None:
    cluster = Told(view(UNDER_WAY), view(UNDER_WAY), view(None))
    done, said = followed(cluster, Answers(*found))
    assert cluster.is_going_back == taken_back == ("other bits: token 3" in said)
    assert said[-1] == last
    assert done == (taken_back or "same" in last)


@pytest.mark.parametrize(
    ("errors", "taken_back", "last"),
    [
        ([Unavailable("no controller"), DeadlineExceeded("no answer")], True, "the rollout was taken back: as asked"),
        ([ConfigurationError("no rollout is running")] * 3, False,
         "The rollout is done: apply the previous configuration to take it back"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_taken_back_also_if_the_controller_is_away_just_then(
    errors: list[TandemError], taken_back: bool, last: str
) -> None:
    class Away(Told):
        async def go_back(self) -> None:
            if errors:
                raise errors.pop(0)
            await super().go_back()

    end = view(None, 3, "the rollout was taken back: as asked") if taken_back else view(None)
    cluster = Away(view(UNDER_WAY), view(UNDER_WAY), view(UNDER_WAY), end)
    done, said = followed(cluster, Answers("token 3"))
    assert (cluster.is_going_back, said[-1], done) == (taken_back, last, False)


def test_a_line_says_what_it_waits_for() -> None:
    assert rollout_line(RolloutView(4, 0, [], 0.0, "room")) == "0 new serve, 0 old left; waits: room"


@pytest.mark.parametrize(
    ("where", "only_asked", "said"),
    [
        ("before", False, []),
        ("apply", False, ["the controller had not answered yet: `tandem status` shows whether a rollout has begun"]),
        ("apply", True, []),
        ("view", False, ["the rollout goes on: `tandem status` shows it, `tandem apply --back` takes it back"]),
    ],
)
def test_an_interrupt_ends_the_command_and_says_what_goes_on(
    where: str, only_asked: bool, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(here: str) -> None:
        if where == here:
            raise KeyboardInterrupt

    class Interrupted(DirectCluster):
        async def apply(self, config: TandemConfig, *, dry_run: bool) -> AppliedChange:
            if dry_run == only_asked:
                ends("apply")
            return AppliedChange([], ["debug"], [], ["decode-0"], 4)

        async def view(self) -> ClusterView:
            ends("view")
            raise AssertionError

    def run(which: object, work: Any, url: str, say: object) -> object:
        ends("before")
        return asyncio.run(work(Interrupted()))

    told: list[str] = []
    monkeypatch.setattr(operate, "with_controller", run)
    target = operate.CommandTarget(WhichCluster(), "http://router", told.append)
    with pytest.raises(KeyboardInterrupt):
        apply(TandemConfig(), target, dry_run=only_asked)
    assert [line for line in told if "controller" in line or "goes on" in line] == said


def test_an_interrupt_waits_for_no_request_that_is_to_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    over, was_waited_for = threading.Event(), threading.Event()

    class Slow(Answers):
        def learn(self) -> int:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            if not over.wait(20.0):
                was_waited_for.set()
            return 1

    monkeypatch.setattr(operate, "with_controller", lambda which, work, url, say: asyncio.run(work(DirectCluster())))
    target = operate.CommandTarget(WhichCluster(), "http://router", lambda line: None)
    with pytest.raises(KeyboardInterrupt):
        apply(TandemConfig(), target, judge=Slow())
    over.set()
    assert not was_waited_for.is_set()


def exchanged(*views: ExchangeView | TandemError | None) -> tuple[bool, list[str]]:
    said: list[str] = []
    told = [one if isinstance(one, TandemError) else msgspec.structs.replace(view(None), exchange=one) for one in views]
    done = asyncio.run(follow_exchange(Told(*told), "ours", said.append, NoTime()))  # type: ignore[arg-type]
    return done, said


def test_it_follows_the_controllers_exchange_while_no_controller_answers() -> None:
    views = (
        ExchangeView("ours", ExchangePhase.CHECKING),
        NodeLost("it was killed"),
        DeadlineExceeded("no answer"),
        ExchangeView("ours", ExchangePhase.REPLACING),
        ExchangeView("ours", ExchangePhase.DONE),
    )
    assert exchanged(*views) == (
        True,
        [
            "the controller: checking",
            "the controller is away, and what serves goes on: it was killed",
            "the controller: replacing",
            "done: the controller is another one, and serves",
        ],
    )
    kept = "the controller was not replaced, and the old one serves: "
    earlier = ExchangeView("earlier", ExchangePhase.DONE)
    assert exchanged(earlier) == (False, [f"{kept}another exchange has begun"])
    unknown = ExchangeView("ours", ExchangePhase.FAILED, "it does not know `cache.colour`")
    assert exchanged(unknown) == (False, [f"{kept}it does not know `cache.colour`"])


@pytest.mark.parametrize("told", [NodeLost("it was ended"), None])
def test_an_exchange_of_which_nothing_is_heard_is_not_followed_for_ever(told: TandemError | None) -> None:
    """`tandem down` on another terminal ends the controller, and forgets its exchange."""
    with pytest.raises(Unavailable, match=r"nothing was heard .* for 300 s \(.*(it was ended|not begun)\)"):
        exchanged(ExchangeView("ours", ExchangePhase.CHECKING), *[told] * 400)


def test_a_rollout_of_which_nothing_is_heard_is_not_followed_for_ever() -> None:
    with pytest.raises(Unavailable, match=r"nothing was heard of the rollout for 300 s \(it was ended\)"):
        followed((view(UNDER_WAY), *[NodeLost("it was ended")] * 400))


@pytest.mark.parametrize("word", ["tandem.yaml", "--dry-run", "--no-wait", "--verify"])
def test_what_is_about_a_new_change_is_refused_when_one_is_taken_back(
    word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operate, "with_controller", lambda *_: pytest.fail("something was changed"))
    assert main(["apply", "--back", word, "--url", "http://127.0.0.1:9"]) == 1
    assert "is about a new change: leave one out" in capsys.readouterr().err
