"""One inference engine: a scheduler, a paged KV cache, a model. No Ray, no HTTP, no sockets.

config      what an engine can be told
request     a request and its life
cache/      which block belongs to whom, and what is in it
scheduling/ who computes how many tokens in the next step
model/      from a scheduled step to sampled tokens
structured/ answers that follow a grammar
core        the step that joins them
loop        the thread that steps, and the mailbox that feeds it; affinity: on which cores
service     what a prefill node and a decode node share above the loop
routers, counters, tracing   whom the service answers, and what it tells of itself
node, node_config, hosting   all of it put together; what it is told; as the process that holds it sees it
host_memory, host_cores      how much memory and how many cores can be had on this machine; control_groups: what limits them
"""
