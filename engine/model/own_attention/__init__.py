"""Layers whose attention is something else than ours: they attend by their own code.

finding  finds what such a layer keeps of each token
step     runs a layer's own attention code on gathered KV, request by request
"""
