"""`tandem apply`: gives a running cluster another configuration, and follows the rollout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from tandem.base.errors import ConfigurationError, DeadlineExceeded, NodeLost, RequestError, Unavailable
from tandem.base.own_thread import from_own_thread
from tandem.cluster.commands.foretelling import foretold
from tandem.cluster.commands.operate import CommandTarget, Say
from tandem.cluster.commands.overview import rollout_line
from tandem.cluster.config import TandemConfig
from tandem.cluster.control import AppliedChange, ClusterView, ExchangePhase, Expectation, not_foretold
from tandem.cluster.describe import counted
from tandem.cluster.models.catalogue import PACKAGED
from tandem.cluster.models.resolved import with_model
from tandem.cluster.models.store import Model, find_model, local_model, name_to_serve, prepare_model
from tandem.cluster.orders import ApplyOrder, GoBackOrder, OperatedCluster, ViewOrder
from tandem.cluster.tasks import Clock
from tandem.cluster.wings import RolloutJudge

LOOK_S = 1.0
SILENT_S = 300.0  # how long nothing may be heard of a rollout or an exchange: the controller's process may be started again meanwhile
_AWAY = "the controller is away, and what serves goes on"
_MOVES = ("router.host", "router.port", "router.placement")
_TOO_LATE = "The rollout is done: apply the previous configuration to take it back"
_PERHAPS = "the controller had not answered yet: `tandem status` shows whether a rollout has begun"
_GOES_ON = "the rollout goes on: `tandem status` shows it, `tandem apply --back` takes it back"


class Application(NamedTuple):
    change: AppliedChange  # that was made, or would be
    done: bool  # all of it
    expected: Expectation


def apply(
    config: TandemConfig,
    target: CommandTarget,
    *,
    dry_run: bool = False,
    wait: bool = True,
    judge: RolloutJudge | None = None,
) -> Application:
    """`judge` takes a rollout back that answers otherwise."""
    url, say, goes_on = target.url, target.say, ""

    async def work(cluster: OperatedCluster) -> Application:
        nonlocal goes_on
        running = await _model_path(cluster) if url is None else ""
        model = await from_own_thread("model", lambda: _model(config, running))
        wanted = with_model(config, model)
        if judge is not None:
            learnt = await from_own_thread("judge", judge.learn)
            say(f"{counted(learnt, 'request')} answered, to be compared")
        if url is not None:
            wanted = await _as_it_is_called(cluster, config, wanted)
        change = await cluster.ask(ApplyOrder(wanted, dry_run=True))
        expected = await _foretold(cluster, change, say)
        if not dry_run:
            goes_on = _PERHAPS
            change = await cluster.ask(ApplyOrder(wanted))
        for line in described(change, dry_run=dry_run):
            say(line)
        replaces = bool(change.nodes or change.routers)
        goes_on = _GOES_ON if not dry_run and (replaces or change.exchange) else ""
        if dry_run or not (replaces or change.exchange):
            return Application(change, True, expected)
        moves = any(name in _MOVES for name in change.routers)
        if moves:
            say("clients find routers at another address now, and for a minute at the old one, too")
        if not wait or (moves and url is not None):
            say(_GOES_ON)
            return Application(change, True, expected)
        done = not change.exchange or await follow_exchange(cluster, change.exchange, say)
        done = (not replaces or await follow(cluster, change.revision, say, judge=judge)) and done
        return Application(change, done, expected)

    try:
        return target.run(work)
    except KeyboardInterrupt:
        if goes_on:
            say(goes_on)
        raise


async def _foretold(cluster: OperatedCluster, change: AppliedChange, say: Say) -> Expectation:
    """`change`: as it would be."""
    if change.sizes and not (change.nodes or change.routers):
        return await foretold(cluster, change.sizes, say)
    expected = Expectation()
    if change.sizes:
        expected = not_foretold("nodes or routers with other settings come in the place of those that serve")
    elif any(name.startswith("pools.") for name in change.at_once):
        expected = not_foretold(
            "limits alone change no size; each step that the load makes within them is foretold then"
        )
    if expected.said:
        say(expected.said)
    return expected


def go_back(target: CommandTarget) -> bool:
    """Takes the rollout back. Returns whether all nodes run the old configuration again."""

    async def work(cluster: OperatedCluster) -> bool:
        await cluster.ask(GoBackOrder())
        return await follow(cluster, (await cluster.ask(ViewOrder())).revision, target.say)

    return target.run(work)


def described(change: AppliedChange, *, dry_run: bool) -> Iterator[str]:
    would = "would be " if dry_run else ""
    if change.at_once:
        yield f"{would}applied at once: {'; '.join(change.at_once)}"
    if change.nodes:
        yield f"nodes read when they start: {', '.join(change.nodes)}"
    if change.routers:
        yield f"routers read when they start: {', '.join(change.routers)}"
    if change.nodes or change.routers:
        yield f"{would}replaced, one after another: {', '.join(change.replaced) or 'nothing'}"
    if change.controller:
        yield f"{would}the controller's, which is replaced first: {', '.join(change.controller)}"
    for name in change.refused:
        yield f"not changed: {name} needs `tandem down`, then `tandem serve`"
    if not (change.at_once or change.nodes or change.routers or change.controller or change.refused):
        yield "nothing is different"


async def follow_exchange(cluster: OperatedCluster, exchange: str, say: Say, clock: Clock | None = None) -> bool:
    """Follows the exchange until it is over. Returns whether a new controller serves. The controller does not answer for a while.
    Raises Unavailable after SILENT_S of that: the cluster may have been ended meanwhile."""
    clock = clock or Clock()
    said, heard = "", clock.now()
    while True:
        try:
            seen = (await cluster.ask(ViewOrder())).exchange
        except (Unavailable, NodeLost, DeadlineExceeded) as error:
            line, seen = f"{_AWAY}: {error}", None
        else:
            line = f"the controller: {seen.phase.value}" if seen is not None else "the controller: not begun"
        if seen is not None and (seen.id != exchange or seen.is_over):
            break
        if line != said and not (seen is None and said.startswith(_AWAY)):
            say(line)
        said = line
        if seen is not None:
            heard = clock.now()
        _check_heard("controller's exchange", clock.now() - heard, line)
        await clock.sleep(LOOK_S)
    if seen.id == exchange and seen.phase is ExchangePhase.DONE:
        say("done: the controller is another one, and serves")
        return True
    say(f"the controller was not replaced, and the old one serves: {seen.why or 'another exchange has begun'}")
    return False


def _check_heard(what: str, silent_s: float, why: object) -> None:
    if silent_s > SILENT_S:
        raise Unavailable(f"nothing was heard of the {what} for {SILENT_S:.0f} s ({why}): look at `tandem status`")


async def follow(
    cluster: OperatedCluster, revision: int, say: Say, clock: Clock | None = None, *, judge: RolloutJudge | None = None
) -> bool:
    """Follows the rollout until it is over, and takes it back if `judge` gets an answer with other bits. Returns whether this revision
    serves then. Waits while the controller does not answer, and raises Unavailable after SILENT_S of that, as `follow_exchange`."""
    clock = clock or Clock()
    said, away, told_until, other, heard = "", False, 0.0, "", clock.now()
    while True:
        try:
            view = await cluster.ask(ViewOrder())
        except (Unavailable, DeadlineExceeded) as error:
            if not away:
                say(f"{_AWAY}: {error}")
            away = True
            _check_heard("rollout", clock.now() - heard, error)
            await clock.sleep(LOOK_S)
            continue
        away, heard = False, clock.now()
        if view.rollout is None and other and view.revision == revision:
            say(_TOO_LATE)
            return False
        if view.rollout is None:
            return _said_end(view, revision, say) and await _is_as_before(judge, say)
        told_until = max(told_until, view.rollout.unix_time)
        for decision in view.decisions:
            if decision.unix_time > told_until:
                told_until = decision.unix_time
                say(decision.text)
        line = rollout_line(view.rollout)
        if line != said:
            say(line)
        said = line
        if judge is not None and (other := await from_own_thread("judge", judge.ask_next)):
            say(f"other bits: {other}")
            judge = None
        if other and await _is_taken_back(cluster, say):
            other = ""
        await clock.sleep(LOOK_S)


async def _is_taken_back(cluster: OperatedCluster, say: Say) -> bool:
    """Returns False if the controller did not take the order: it is away, or the rollout has just ended."""
    try:
        await cluster.ask(GoBackOrder())
    except (Unavailable, DeadlineExceeded, ConfigurationError, RequestError) as error:
        say(f"it is not taken back yet: {error}")
        return False
    return True


async def _is_as_before(judge: RolloutJudge | None, say: Say) -> bool:
    """Asks once more when only new nodes serve: a short rollout may be over before all of them were asked."""
    if judge is None:
        return True
    if other := await from_own_thread("judge", judge.ask_all):
        say(f"other bits: {other}. {_TOO_LATE}")
        return False
    say(judge.compared)
    say("same bits as before")
    return True


def _said_end(view: ClusterView, revision: int, say: Say) -> bool:
    if view.revision == revision:
        routers = [router for router in view.routers if router.phase != "draining"]
        parts = f"{counted(len(view.nodes), 'node')} and {counted(len(routers), 'router')}"
        say(f"done: {parts} serve with this configuration")
        return True
    reasons = [one.text for one in view.decisions if "taken back" in one.text]
    say(reasons[-1] if reasons else "the rollout was taken back")
    return False


async def _as_it_is_called(cluster: OperatedCluster, config: TandemConfig, wanted: TandemConfig) -> TandemConfig:
    """A router does not tell where the cluster's model is. If the cluster has it in the same place as this machine, it is the same model."""
    here = await from_own_thread("model", lambda: find_model(config.model.path))
    if here is not None and "model.path" in (await cluster.ask(ApplyOrder(wanted, True))).nodes:
        same = with_model(config, here)
        if "model.path" not in (await cluster.ask(ApplyOrder(same, True))).nodes:
            return same
    return wanted


async def _model_path(cluster: OperatedCluster) -> str:
    from tandem.cluster.on_ray.remote_controller import RemoteController

    return (await cluster.configuration()).model.path if isinstance(cluster, RemoteController) else ""


def _model(config: TandemConfig, running: str) -> Model:
    """Returns the model as the cluster finds it: if that serves from a folder, the folder on this machine."""
    name = f"{config.model.path}@{config.model.revision}" if config.model.revision else config.model.path
    if os.path.isabs(running):
        return prepare_model(name, lambda what, share: None)
    local = None if config.model.path in PACKAGED else local_model(config.model.path)
    path = config.model.path if local is None else str(local)
    return Model(path, name_to_serve(config.model.path))
