"""LoRA adapters on the general path: several in one batch, with one copy of the model's weights. README.md lists the
files."""
