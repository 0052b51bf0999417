"""The processes of a node that is wider than one device.

messages     the messages between rank 0 and another rank during its start, and between two machines of a node
memory       shared memory: each step's arrays, and every rank's beat
link         the connection between rank 0's machine and another machine of the node
group        torch.distributed between the ranks
process      the main program of a rank other than 0
processes    starts the ranks of one machine, watches them, and ends them together
supervisor   rank 0's view of all ranks: it owns those of its machine, and the links to the other machines
loading      starts the other ranks, and loads all parts of the model
keeper       starts, watches and ends the ranks on another machine, on behalf of rank 0
"""
