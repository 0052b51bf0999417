"""The real cluster on one clock: routers, nodes and the protocol between them run in one thread, on virtual time, over a network, memory
and processes that fail by a seed. `python -m tests.world.search` runs schedules; a seed is a schedule, and gives the same history again.

network   frames on their way: delay, loss, doubling, reordering, cut links
process   what a process is here: its clock, whether it runs, is stopped or has ended, and what is due in it
model     a model whose next token is a function of the KV blocks as they lie in memory
moves     moves of blocks between nodes' memory, which stall, fail half-way, or flip a bit
node      the product's node around that model: service, loop, scheduler, cache, connector
router    the product's dispatcher, pool and links
schedule  what happens in a schedule: requests, faults, healing; and what must hold
search    runs schedules by their seeds, and prints those that break a promise
seeds     seeds that broke one
shrink    makes such a schedule smaller
diagram   draws what happened in it
mutants   bugs that are put in, to see how soon they are found
"""
