"""Every model's estimate of its work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tandem.engine.model.capabilities import Capability, ModelLoad
from tandem.engine.model.work.estimate import work_of

if TYPE_CHECKING:
    from tandem.engine.model.runner import ModelInfo


def capability(loading: ModelLoad) -> Capability | None:
    return EstimatedWork(loading)


class EstimatedWork(Capability):
    def __init__(self, loading: ModelLoad) -> None:
        self._source, self._config = loading.source, loading.config

    def complete(self, info: ModelInfo) -> ModelInfo:
        return msgspec.structs.replace(info, work=work_of(self._source, self._config, info))
