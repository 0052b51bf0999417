"""KV events for programs outside Tandem.

part        opens the publisher that `cache.events` asks for
publisher   publishes events over ZMQ, numbered, in vLLM's format
"""
