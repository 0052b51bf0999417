"""Models that read images: rows from the vision tower replace the embeddings of an image's placeholders. README.md
lists the files."""
