"""LoRA adapters that change while the cluster serves. README.md lists the files."""
