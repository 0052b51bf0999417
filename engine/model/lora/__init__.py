"""LoRA adapters on the general path: several in one batch, with one copy of the model's weights.

folder      reads and checks a PEFT folder, and identifies it by its content
rows        computes what adapters add to the rows of one linear layer
layers      finds the linear layers that an adapter may change, and wraps them
slots       which adapters the node has, and which of them are in the layers' slots
part        tells each batch the slots of its rows' adapters
capability  whether a load asks for adapters, and what it refuses
"""
