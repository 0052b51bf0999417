"""Decides which vectors a model makes, by `model.pooling` or by the files that sentence-transformers writes next to a checkpoint."""

from __future__ import annotations

import logging
from pathlib import PurePosixPath
from typing import Any

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.engine.model.source import ModelSource
from tandem.wire.pooling import Pooling, PoolingKind

log = logging.getLogger(__name__)

MODULES = "modules.json"
_KINDS = {
    "pooling_mode_cls_token": PoolingKind.CLS,
    "pooling_mode_mean_tokens": PoolingKind.MEAN,
    "pooling_mode_lasttoken": PoolingKind.LAST,
}
_PLAIN_NAMES = {"cls": PoolingKind.CLS, "mean": PoolingKind.MEAN, "lasttoken": PoolingKind.LAST}
_OVERRIDE = "set model.pooling to mean, last or cls, or to none to serve it without vectors"


class _Module(msgspec.Struct):
    type: str
    path: str = ""


def find_pooling(setting: str, source: ModelSource, config: Any) -> Pooling | None:
    """Returns None if the model makes no vectors. `setting` is model.pooling."""
    if setting == "none":
        return None
    modules = _modules(source) if setting == "auto" else []
    if setting == "auto" and not modules:
        return None
    _refuse_other_heads(source)
    _refuse_full_attention(source, config)
    if setting != "auto":
        return Pooling(PoolingKind(setting))
    kind: PoolingKind | None = None
    normalize = False
    for module in modules:
        name = module.type.rpartition(".")[2]
        if name == "Pooling":
            kind = _kind_in(source, module.path)
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise ConfigurationError(
                f"{source.name}: {MODULES} ends its vectors with a {name}, which is not computed here: {_OVERRIDE}"
            )
    if kind is None:
        raise ConfigurationError(f"{source.name}: {MODULES} names no Pooling: {_OVERRIDE}")
    log.info("%s makes vectors: pooling by %s%s", source.name, kind, ", normalized" if normalize else "")
    return Pooling(kind, normalize)


def _modules(source: ModelSource) -> list[_Module]:
    try:
        content = (source.folder / MODULES).read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigurationError(f"{source.folder / MODULES} cannot be read: {error}") from error
    try:
        return msgspec.json.decode(content, type=list[_Module])
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{source.folder / MODULES} is no list of modules ({error}): {_OVERRIDE}") from error


def _kind_in(source: ModelSource, path: str) -> PoolingKind:
    folder = PurePosixPath(path)
    if folder.is_absolute() or ".." in folder.parts:
        raise ConfigurationError(f"{source.name}: {MODULES} names a folder outside of its own: {path}")
    content = source.read_json(str(folder / "config.json"))
    plain = content.get("pooling_mode")  # newer versions write this key
    if isinstance(plain, str) and plain in _PLAIN_NAMES:
        return _PLAIN_NAMES[plain]
    modes = [name for name, value in content.items() if name.startswith("pooling_mode") and value not in (False, None)]
    if len(modes) == 1 and modes[0] in _KINDS:
        return _KINDS[modes[0]]
    raise ConfigurationError(
        f"{source.name}: its pooling is {', '.join(modes) or 'not given'} in {folder / 'config.json'}, and one of "
        f"{', '.join(_KINDS)} is known here: {_OVERRIDE}"
    )


def _refuse_other_heads(source: ModelSource) -> None:
    for name in source.read_json("config.json").get("architectures") or ():
        if str(name).endswith("ForSequenceClassification"):
            raise ConfigurationError(
                f"{source.name} is a {name}: it scores pairs of texts with a head of its own, which is not computed here. "
                "/v1/score and /v1/rerank compare vectors: serve an embedding model for them"
            )


def _refuse_full_attention(source: ModelSource, config: Any) -> None:
    text = config.get_text_config()
    written = source.read_json("config.json")
    for where in (written, *(part for part in written.values() if isinstance(part, dict))):
        if where.get("is_causal") is False or where.get("use_bidirectional_attention") is True:
            raise ConfigurationError(
                f"{source.name} cannot make vectors: its tokens attend to those after them (type {text.model_type}), and "
                "attention here is causal: serve a model whose attention is"
            )
