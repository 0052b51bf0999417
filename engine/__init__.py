"""One inference engine: a scheduler, a paged KV cache, a model. No Ray, no HTTP, no sockets.

contract    what a node needs of an engine, whichever it is
config      the engine's settings
request     a request: its inputs, its tokens so far, its status
cache/      the block pool, the prefix cache, and which request owns which block
scheduling/ decides which requests compute how many tokens in the next step
model/      computes a scheduled step: from token ids to sampled tokens
structured/ grammars for structured output
core        one step of the engine: scheduler, connector, model, in that order
vllm/       another engine, which steps vLLM
wings       the engines besides this one
tracing     where the time of a traced request went
"""
