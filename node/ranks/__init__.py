"""The processes of a node that is wider than one device.

messages     what rank 0 and another one say to each other while they start, and machines over a link
memory       shared memory: each step's arrays, and every rank's beat
link         between rank 0's machine and another one
group        torch.distributed between the ranks
process      another rank, from its start to its end
processes    one machine's ranks: starts them, watches them, and ends them as one
supervisor   rank 0's: the ranks of its own machine, and what it knows of the others'
keeper       another machine's ranks, for rank 0
"""
