"""How KV blocks travel between nodes. Floor 2: knows the wire, neither the engine nor the router.

The engine sees only `base`; a connector is found by name through `registry`.
"""
