"""Turns a model's name into a folder that a node can open, on the node's machine.

catalogue   the models that have a name of their own
store       finds a model on this machine, or runs `fetch`. Nodes and routers call it themselves
adapters    the same for LoRA adapters
fetch       the process that fetches and converts one model
fetched     lists and deletes the models on this machine
resolved    fills in the configuration what follows from the model
"""
