"""The real cluster on one clock: routers, nodes and the protocol between them run in one thread, on virtual time, over a network, memory
and processes that fail by a seed. `python -m tests.world.search` runs schedules; a seed is a schedule, and gives the same history again.

disk      files that outlive a process, on disks that are slow, hang, are full, or lose what was not synced
network   frames on their way: delay, loss, doubling, reordering, cut links
process   what a process is here: its clock, whether it runs, is stopped or has ended, and what is due in it
model     a model whose next token is a function of the KV blocks as they lie in memory
clocks    each process's seconds, a little longer or shorter than others', and times of day that jump
stranger  a process that no one admitted, and what it forges
moves     moves of blocks between nodes' memory, which stall, fail half-way, or flip a bit
line      the node's end of its lines to routers
node      the product's node around that model: service, loop, scheduler, cache, connector
router    the product's dispatcher, pool and links
news      what a node tells routers of its cache
features  what is switched on in a schedule: policies, pins, news of caches, sibling routers
adapters  LoRA adapters, whose weights are replaced while requests run
images    images in prompts, encoder nodes, and what happens to them
background  answers that nodes keep when their router ends
storage   the tiers and disks of a schedule, what happens to them, and prompts that come again
wrong_kv  KV that becomes wrong silently, who finds it, and that nothing of it is used from then on
tiers     the tiers of a node: the product's, with copies on the world's clock
sharing   tiers that nodes share: copies from another node's, mirrors of running requests
schedule  what happens in a schedule: requests, faults, healing; and what must hold
control   schedules of the control plane: operators' orders, kills of the controller, rollouts; control_ray: Ray as it uses it
search    runs schedules by their seeds, and prints those that break a promise
seeds     seeds that broke one
shrink    makes such a schedule smaller
diagram   draws what happened in it
mutants   bugs that are put in, each of which must be found; tier_mutants: of tiers and of distrust; feature_mutants: of what not
          every schedule has; control_mutants: of the control plane
"""
