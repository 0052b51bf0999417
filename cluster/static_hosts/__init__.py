"""Machines that exist already, as pools for `ray up` and Ray's autoscaler.

provider        a node provider in Ray's sense
config          what operators write about hosts, checked
record, store   which hosts and nodes there are; where that is kept
reach, shell    how hosts are reached from the head and from elsewhere; runs scripts there
"""
