"""How KV blocks travel between nodes. Floor 2: knows the wire, neither the engine nor the router.

The engine sees only `base`, with the `memory` that a cache lies in, and what `config` says of it; a connector is found by name through `registry`, and `multi` makes what a node needs one. `protocol/` is
what two nodes say to each other, whatever moves the bytes; `nixl/` and `nccl/` move them. `offload/` keeps copies of blocks
beyond the device. `events` publishes for other programs what was cached and evicted. `nixl_check` asks whether NIXL works on this machine.
"""
