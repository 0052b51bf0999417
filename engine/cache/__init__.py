"""The KV cache's bookkeeping: which block belongs to whom, and what is in it. No tensor is touched here.

groups          which layers share a block table
free_queue      the blocks that nobody uses, in order of eviction
pool            all blocks: owners, hashes, eviction
hashing         names for full blocks
group_manager   the block tables of one group; full_attention and sliding_window are its kinds
coordinator     several groups, one answer
manager         what the scheduler calls: find a prefix, get slots, give them back
"""
