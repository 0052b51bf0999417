"""One inference engine: a scheduler, a paged KV cache, a model. No Ray, no HTTP, no sockets.

config      what an engine can be told
request     a request and its life
cache/      which block belongs to whom, and what is in it
scheduling/ who computes how many tokens in the next step
model/      from a scheduled step to sampled tokens
structured/ answers that follow a grammar
core        the step that joins them
canary      compares received KV with KV computed here, in idle time
tracing     where a request's time went
"""
