"""The models that were fetched to this machine: Tandem's own, and those in the Hugging Face hub's cache."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.cluster.describe import format_size
from tandem.cluster.models.catalogue import PACKAGED
from tandem.cluster.models.store import is_complete, models_folder


class FetchedModel(msgspec.Struct, frozen=True):
    name: str  # as `tandem serve` takes it
    path: str
    num_bytes: int


def fetched_models(folder: Path | None = None) -> list[FetchedModel]:
    return sorted([*_packaged(folder or models_folder()), *_from_hub()], key=lambda model: model.name)


def remove(names: Sequence[str], folder: Path | None = None) -> list[FetchedModel]:
    """Deletes these models, or none of them if one is unknown. A node that serves one keeps what it has loaded."""
    there = {model.name: model for model in fetched_models(folder)}
    unknown = [name for name in names if name not in there]
    if unknown:
        known = ", ".join(there) or "none"
        raise ConfigurationError(f"{', '.join(unknown)} was not fetched to this machine; there is: {known}")
    chosen = [there[name] for name in dict.fromkeys(names)]
    for model in chosen:
        try:
            shutil.rmtree(model.path)
        except OSError as error:
            raise Unavailable(f"{model.name} cannot be deleted: {error}") from error
    return chosen


def show(models: Sequence[FetchedModel]) -> str:
    if not models:
        return "no model was fetched to this machine; `tandem models fetch MODEL` does so\n"
    widest = max(len(model.name) for model in models)
    return "".join(f"{model.name:<{widest}}  {format_size(model.num_bytes):>9}  {model.path}\n" for model in models)


def _packaged(folder: Path) -> Iterator[FetchedModel]:
    for name, packaged in PACKAGED.items():
        target = folder / packaged.name
        if is_complete(target, packaged):
            size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
            yield FetchedModel(name, str(target), size)


def _from_hub() -> Iterator[FetchedModel]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, ValueError):  # nothing was ever fetched, or HF_HOME names no folder
        return
    for repo in cache.repos:
        if repo.repo_type == "model":
            yield FetchedModel(repo.repo_id, str(repo.repo_path), repo.size_on_disk)
