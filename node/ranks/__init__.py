"""The processes of a node that is wider than one device.

messages     what rank 0 and another one say to each other while they start
memory       shared memory: each step's arrays, and every rank's beat
group        torch.distributed between the ranks
process      another rank, from its start to its end
supervisor   starts them, watches them, and ends them as one
"""
