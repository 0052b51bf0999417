"""Fills in the configuration what follows from the model."""

from __future__ import annotations

import asyncio

import msgspec

from tandem.api.text.chat_template import template_source
from tandem.base.errors import ConfigurationError
from tandem.cluster.config import TandemConfig
from tandem.cluster.models.adapters import adapter_place
from tandem.cluster.models.catalogue import PACKAGED
from tandem.cluster.models.store import Model, check_name, local_model, resolve_revision, tokenizer_folder
from tandem.engine.config import OWN_HEAD, SchedulingPolicy


def with_model(config: TandemConfig, model: Model) -> TandemConfig:
    own = config.router.chat_template  # read now, because the file is on the operator's machine
    replace = msgspec.structs.replace
    name = config.model.served_name or model.served_name
    if name in config.model.adapters:
        raise ConfigurationError(
            f"model.adapters has {name!r}, which is the model's own name: call the adapter something else"
        )
    adapters = {each: adapter_place(each, where) for each, where in config.model.adapters.items()}
    return replace(
        config,
        model=replace(
            config.model, path=model.path, served_name=name, adapters=adapters, draft=draft_place(config.model.draft)
        ),
        router=replace(
            config.router,
            tokenizer_path=tokenizer_folder(model.path),
            model_name=name,
            log_level=config.logs.level,
            log_format=config.logs.format,
            by_priority=config.scheduler.policy is SchedulingPolicy.PRIORITY,
            slo_ttft_s=config.slo.ttft_s,
            slo_inter_token_s=config.slo.inter_token_s,
            chat_template=template_source(own) if own is not None else None,
        ),
    )


def draft_place(name: str) -> str:
    """Returns a name or path of the draft model that every process can read from any working directory. Raises ConfigurationError."""
    if name in ("", OWN_HEAD):
        return name
    check_name(name, setting="model.draft")
    local = local_model(name, setting="model.draft") if name not in PACKAGED else None
    return str(local) if local is not None else name


async def fix_model(config: TandemConfig, commit: str) -> tuple[TandemConfig, str]:
    """Implements `cluster.launcher.FixModel`. Asks the hub only if no commit was recorded."""
    model = config.model
    commit = commit or await asyncio.to_thread(resolve_revision, model.path, model.revision)
    if not commit:
        return config, ""
    replace = msgspec.structs.replace
    path = f"{model.path}@{commit}"
    fixed = replace(
        config, model=replace(model, path=path, revision=commit), router=replace(config.router, tokenizer_path=path)
    )
    return fixed, commit
