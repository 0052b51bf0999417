"""Transfers of a node whose ranks keep their KV apart.

sharded  a transport that splits each move among the ranks of this node, and of its peers
lines    the messages between rank 0 and another rank of its node, and the line that carries them
thread   another rank's part of transfers
"""
