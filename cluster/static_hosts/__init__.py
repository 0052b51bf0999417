"""Machines that one has, as pools for `ray up` and Ray's autoscaler.

provider        what Ray calls a node provider
config          what the operator writes, checked
record, store   which hosts and nodes there are, and where that is kept
reach, shell    how hosts are reached: from the head, and through it
"""
