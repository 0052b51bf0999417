"""The configuration with what follows from the model filled in."""

from __future__ import annotations

import msgspec

from tandem.cluster.config import TandemConfig
from tandem.cluster.models.store import Model, tokenizer_folder


def with_model(config: TandemConfig, model: Model) -> TandemConfig:
    replace = msgspec.structs.replace
    name = config.model.served_name or model.served_name
    return replace(
        config,
        model=replace(config.model, path=model.path, served_name=name),
        router=replace(config.router, tokenizer_path=tokenizer_folder(model.path), model_name=name),
    )
