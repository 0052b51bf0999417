"""The canary for wrong KV.

part    lets the engine check what peers have sent, in idle time
canary  recomputes a received prompt and compares the KV
"""
