"""The configurations that a recorded state names, each with its model fixed to one commit."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tandem.cluster.config import TandemConfig
from tandem.cluster.launcher import FixModel
from tandem.cluster.pools.state import ClusterState


@dataclass(frozen=True, slots=True)
class RevisionConfigs:
    config: TandemConfig  # as the operator wants it
    fixed: TandemConfig  # for what starts from now on
    by_revision: dict[int, TandemConfig]
    commit: str  # of the current revision's model, "" if it has none


async def resolve(state: ClusterState, given: TandemConfig, fix_model: FixModel) -> RevisionConfigs:
    """`given` is the configuration with which the controller's process was created. Whatever can fail about a configuration fails here:
    call it before the state is recorded."""
    revision, rollout = state.revision, state.rollout
    config = as_in_this_process(revision.config, given)
    fixed, commit = await fix_model(config, revision.commit)
    configs = {revision.number: fixed}
    if rollout is not None:
        before = rollout.before
        configs[before.number], _ = await fix_model(before.config or given, before.commit)
        if not rollout.going_back:
            # A router that starts during the rollout uses the tokenizer of the nodes that serve.
            path = configs[before.number].router.tokenizer_path
            router = msgspec.structs.replace(fixed.router, tokenizer_path=path)
            fixed = msgspec.structs.replace(fixed, router=router)
    return RevisionConfigs(config, fixed, configs, commit)


def as_in_this_process(config: TandemConfig | None, given: TandemConfig) -> TandemConfig:
    """Returns the configuration with the environment that this process has as the controller's."""
    if config is None:
        return given
    controller = msgspec.structs.replace(config.controller, env=given.controller.env)
    return msgspec.structs.replace(config, controller=controller)


def at_commit(state: ClusterState, commit: str) -> ClusterState:
    return msgspec.structs.replace(state, revision=msgspec.structs.replace(state.revision, commit=commit))
