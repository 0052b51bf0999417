"""Recurrent states among the blocks: which blocks a request's states fill, and after which tokens they are kept.

joined       what the cache finds here
tables       the block table of a group of recurrent states, and the blocks of checkpoints
checkpoints  after which tokens of a request its recurrent states are kept
"""
