"""A tier in an object store: `cache.tiers: [{spec: objects, options: {url: https://host/bucket}}]`. Nodes that never met find what the
others have computed.

`options` is what an operator writes. `signing` signs requests (signature version 4), `client` makes them, each with a
deadline. `eras` says which of the store's content is valid, `chunks` reads and writes it, and `inquiries` finds out what is there;
`workers` are threads for several requests at a time. `tier` is what the connector of tiers asks for.
"""

from __future__ import annotations

from tandem.kvtransfer.objects.tier import create

__all__ = ["create"]
