"""The decode node, the consumer: reserves blocks, waits for the KV, decodes and streams tokens. It computes the prompt itself if a
request has no transfer, so an aggregated node is one, too.

node    the node and its rules
actor   the node as a Ray actor
role    what a cluster does for it
"""
