"""One model on several ranks: tensor parallel and pipeline parallel. Each rank keeps the KV of its own heads or layers.
README.md lists the files."""
