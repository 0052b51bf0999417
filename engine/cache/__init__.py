"""The KV cache's bookkeeping: which request owns which block, and what each block holds. It touches no tensor.

pool            all blocks: reference counts, hashes, the free queue in order of eviction, KV events, cache residency times
hashing         chained hashes of full blocks
group_manager   KV cache groups, and the block tables of one: full attention, sliding window, chunked
wings           the contract of recurrent states among the blocks; states/ has them
manager         the scheduler's interface: find a prefix, allocate slots, free them; coordinates several groups
"""
