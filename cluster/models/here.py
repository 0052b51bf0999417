"""The model on the machine that this runs on. Nodes and routers call it in their own processes."""

from __future__ import annotations

from tandem.cluster.models.store import Report, prepare_model


def find_model_here(name: str, report: Report) -> str:
    """Its path. A folder or file that every machine shares is used as it is; what has a name is fetched once for each."""
    return prepare_model(name, report).path
