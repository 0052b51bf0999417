"""Models in a Python program, without a server of one's own: `from tandem import LLM`.

llm         `LLM`: texts, chats and vectors from a server that is started for it, or from a running cluster
params      `tandem.SamplingParams`, and the results, by vLLM's names
own_server  a server that this process starts, and ends
"""
