"""LoRA adapters on the general path: many in one batch, over one copy of the model's weights.

folder      what a PEFT folder says: checked, read, identified by its content
rows        what adapters add to the rows of one linear layer
layers      the model's linear layers that an adapter may change
slots       which adapters the node has, and which of them lie on the device for this step
"""
