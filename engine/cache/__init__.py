"""The KV cache's bookkeeping: which request holds which block, and what is in it. It touches no tensor.

pool            all blocks: owners, hashes, those that no request uses in order of eviction; how long what is cached stays; for routers, which
                hashes appeared and vanished
hashing         hashes of full blocks
group_manager   which layers share a block table; the tables of one group: full, with a sliding window, chunked
state_slots     the same for recurrent states; checkpoints says which of them are kept
encoder_cache   which images the vision tower has encoded, and for whom
manager         what the scheduler calls: find a prefix, get slots, give them back; one answer from several groups
"""
