"""The KV cache's bookkeeping: which request holds which block, and what is in it. It touches no tensor.

groups          which layers share a block table
free_queue      the blocks that no request uses, in order of eviction
pool            all blocks: owners, hashes, eviction
residency       how long what is cached stays, and lies idle
hashing         hashes of full blocks
events          which hashes appeared and vanished, for routers
group_manager   the block tables of one group; attention_kinds: full, with a sliding window, chunked; state_slots: recurrent,
                and checkpoints says which states are kept
coordinator     one answer from several groups
encoder_cache   which images the vision tower has encoded, and for whom
manager         what the scheduler calls: find a prefix, get slots, give them back
"""
