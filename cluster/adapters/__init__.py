"""LoRA adapters that change while the cluster serves.

changes    changes all nodes or none, beside a controller
command    `tandem adapters`; commands: its row in the table
"""
