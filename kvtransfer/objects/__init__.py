"""A tier in an object store: `cache.tiers: [{spec: objects, options: {url: https://host/bucket}}]`. Nodes that never
met find what the others have computed. README.md lists the files."""

from tandem.kvtransfer.objects.tier import create

__all__ = ["create"]
