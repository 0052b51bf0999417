"""From a model's name to a folder that a node can open, on the machine where the node is."""
