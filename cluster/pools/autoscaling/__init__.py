"""Pools that grow and shrink by their load.

rules        when a pool is resized, and why; pure
load_meter   each pool's load, look by look, from what its nodes report
autoscaler   the loop that measures and decides; the simulator's, too
wing         that loop beside a controller
"""
