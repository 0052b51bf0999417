"""The canary for wrong KV. README.md lists the files."""
