"""vLLM as the engine of a node: its EngineCore in the node's process, stepped by the node's loop. README.md lists the
files."""
