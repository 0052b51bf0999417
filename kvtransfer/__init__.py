"""How KV blocks travel between nodes. Floor 2: knows the wire, neither the engine nor the router.

The engine sees only three files: `base` has the contract, `memory` describes the memory of a KV cache, `config` has the
settings. `registry` finds a connector by name, and `multi` combines the connectors that a node needs into one.
`protocol/` is what two nodes say to each other, whatever moves the bytes; `nixl/` and `nccl/` move them. `offload/`
keeps copies of blocks outside the device, `objects/` in an object store. `sources` knows which peers' KV is here, so that it is given up when they
distrust it. `nixl_check` tests whether NIXL works on this machine.
"""
