"""Learns what this node's steps take, while it serves: the simulator's input, without a profile.

part    sees each step of the engine, and tells the costs with the node's counters
learner a fit that forgets, and the machine's present pace
kept    the costs between two starts of the node
"""
