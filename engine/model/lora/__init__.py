"""LoRA adapters on the general path: many in one batch, over one copy of the model's weights.

folder      what a PEFT folder says: checked, read, identified by its content
layers      the model's linear layers, and what adapters add to their rows
slots       which adapters the node has, and which of them lie on the device for this step
"""
