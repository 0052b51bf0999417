"""Tiers of the KV cache outside the device: full blocks are copied there while their requests run, and loaded again.

`scheduler_half` and `worker_half` are the connector: they know requests, steps and block tables, and no memory.
`prefixes` says which chunks a prefix needs, with windows and recurrent states, and how much of one a tier has.
`spec` is the interface of a tier: a `manager`, which says where each block is, with one of the `policies` for
evicting, and a mover, which copies. `cpu` is the tier in host memory; `disk` outlives the process, and `files` has its
calls to the file system; `chunks` copies through chunks of host memory; `synthetic` makes KV up, for measurements. `patience` has the deadlines of copies, and when a
tier is left out. If a node's ranks keep their KV apart, `ranks` has each of them copy its part. With `sharing`,
`lending`, `fetches` and `exchange`, nodes read each other's tier in host memory.
"""
