"""What shows of a model before anything starts: its context, the KV cache of one request, and whether the hub has it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tandem.base.errors import ConfigurationError, TandemError
from tandem.cluster.config import TandemConfig
from tandem.cluster.describe import format_size
from tandem.cluster.models.catalogue import PACKAGED
from tandem.cluster.models.store import find_model, split_revision
from tandem.cluster.settings.rules import wings_with_rules
from tandem.engine.config import OWN_ENGINE
from tandem.engine.model.context import context_length
from tandem.wire.nodes import ENGINE_ROLES

if TYPE_CHECKING:
    import httpx

_HUB_S = 5.0
_REFUSED = (401, 404)
# Models whose layers all keep the KV of every token.
_PLAIN = ("llama", "mistral", "qwen2", "qwen3")


def check_context(config: TandemConfig) -> None:
    """Raises ConfigurationError if a request may be longer than the model's context, or if the KV cache has no room for the longest one.
    What a configuration file does not tell is left to the nodes."""
    written = _written(config.model.path)
    if written is None:
        return
    for role in ENGINE_ROLES:
        if not config.pools.of(role).last_size:
            continue
        engine = config.engine_of(role)
        try:
            length = context_length(written, engine.scheduler.max_model_len)
        except ConfigurationError:
            if getattr(written.get_text_config(), "max_position_embeddings", None) is None:
                return
            raise
        limit, size = engine.cache.memory_bytes, engine.cache.block_size
        blocks = -(-length // size) + 1  # one is the null block
        needed = blocks * size * _token_bytes(written, config, engine.cache.dtype)
        if limit is not None and needed > limit and config.pools.of(role).ranks == 1:
            raise ConfigurationError(
                f"the KV cache of each {role.value} node needs {format_size(needed)} for one request of {length} tokens, and may use "
                f"{format_size(limit)}: raise --kv-memory, or accept shorter requests with --max-model-len"
            )


def check_type(config: TandemConfig) -> None:
    """Raises ConfigurationError if the settings refuse a model of this type. A model that is not here yet is left to the nodes."""
    if config.model.engine == OWN_ENGINE and (written := _written(config.model.path)) is not None:
        for wing in wings_with_rules():
            wing.check_type(config.engine, written.model_type)


def _written(name: str) -> Any | None:
    """Returns the model's config.json with the names that transformers gives its fields; None if it is not on this machine."""
    try:
        found = find_model(name)
        content = json.loads((Path(found.path) / "config.json").read_bytes()) if found is not None else None
    except (OSError, ValueError, TandemError):
        return None
    if not isinstance(content, dict):
        return None
    text = dict(content.get("text_config") or content)
    if isinstance(scaling := text.get("rope_scaling"), dict) and not text.get("rope_parameters"):
        text["rope_parameters"] = {**scaling, "rope_type": scaling.get("rope_type", scaling.get("type", "default"))}
    described = SimpleNamespace(**text)
    return SimpleNamespace(model_type=content.get("model_type"), get_text_config=lambda: described)


def _token_bytes(written: Any, config: TandemConfig, cache_dtype: str) -> int:
    """Returns the least that the KV of one token takes; 0 if the configuration does not tell."""
    text = written.get_text_config()
    if written.model_type not in _PLAIN or getattr(text, "sliding_window", None):
        return 0
    try:
        heads = int(text.num_attention_heads)
        kept = int(getattr(text, "num_key_value_heads", None) or heads)
        size = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        number = 1 if cache_dtype == "fp8" else 4 if config.model.dtype == "float32" else 2
        return 2 * int(text.num_hidden_layers) * kept * size * number
    except (AttributeError, TypeError, ValueError, ZeroDivisionError):
        return 0


def check_hub(name: str, environ: Mapping[str, str] = os.environ, transport: httpx.BaseTransport | None = None) -> None:
    """Raises ConfigurationError for a model that is not on this machine, if it must come from the hub and that does not answer or does not
    have it."""
    if name in PACKAGED or _was_fetched(name, environ):
        return
    import httpx  # it takes a while, and most models are here

    repository = split_revision(name)[0]
    if environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ConfigurationError(
            f"{repository} is not on this machine, and HF_HUB_OFFLINE forbids to fetch it: name a folder, or unset it"
        )
    hub = environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        with httpx.Client(timeout=_HUB_S, transport=transport, follow_redirects=True) as client:
            answer = client.get(f"{hub}/api/models/{repository}")
    except (httpx.ConnectError, httpx.TimeoutException) as error:
        if "CERTIFICATE" in str(error):  # the hub's own client may trust others
            return
        raise ConfigurationError(
            f"{repository} is not on this machine, and the Hugging Face hub ({hub}) cannot be reached ({str(error) or 'no answer'}): fetch "
            "it where there is a network, and name its folder"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, ImportError):
        return  # the hub's own client may understand the proxy in the environment, or says what is wrong with it
    if answer.status_code in _REFUSED and not _has_token(environ):
        raise ConfigurationError(
            f"the Hugging Face hub ({hub}) does not have {repository}, or it needs a token (HF_TOKEN): name another model"
        )


def _hub_home(environ: Mapping[str, str]) -> Path:
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get("HF_HOME") or f"{cache}/huggingface").expanduser()


def _was_fetched(name: str, environ: Mapping[str, str]) -> bool:
    kept = Path(environ.get("HF_HUB_CACHE") or _hub_home(environ) / "hub").expanduser()
    folder = kept / f"models--{split_revision(name)[0].replace('/', '--')}" / "snapshots"
    return any(folder.glob("*"))


def _has_token(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("HF_TOKEN")) or (_hub_home(environ) / "token").exists() or "HF_TOKEN_PATH" in environ
