"""KV events for programs outside Tandem. README.md lists the files."""
