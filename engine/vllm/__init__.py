"""vLLM as the engine of a node: its EngineCore in the node's process, stepped by the node's loop.

wing      what the rest of Tandem knows of it: its name, the settings that it lacks, and what a Python has of it
look      a script without imports of ours, which that Python runs to say what it has
engine    the engine, by the contract of engine.contract
requests  a request in vLLM's words, and its outputs in ours
settings  vLLM's arguments from Tandem's settings
connector vLLM's connectors, which pass every call on to the halves of ours
handover  what joins them, and how vLLM sees a failed load
seeds     makes its noise depend on a request's seed and a token's position alone
figures   what its scheduler counts, under the names of our metrics
"""
