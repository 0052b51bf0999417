"""Tiers of the KV cache beyond the device: full blocks are copied away while their requests run, and loaded again.

`scheduler_half` and `worker_half` are the connector: they know requests, steps and block tables, and nothing of memory. `prefixes`
says what a prefix is made of, with windows and recurrent states, and how much of one is there. What a
tier must bring is in `spec`: a `manager`, which says where which block is, with one of the `policies` for what is given up, and
a mover, which copies. `cpu` is the tier in host memory, `disk` the one that outlives the process; `synthetic` makes KV up, for
measurements. Where a node's ranks keep their KV apart, `ranks` has each of them copy its part. By `sharing`, `fetches` and `exchange` nodes read each other's tier in host memory.
"""
