"""From a model's name to a folder that a node can open, on the machine where the node is.

catalogue   the models that come with a name of their own
store       is it here, and what is it called; runs `fetch` where it is not. Nodes and routers call it themselves
adapters    the same for LoRA adapters
fetch       the process that fetches and converts one
fetched     what lies on this machine: listed, deleted
resolved    the configuration with what follows from the model filled in
"""
