"""Models that read images: rows from the vision tower replace the embeddings of an image's placeholders.

tower       encodes the parts of image files into rows
alone       loads a vision tower without its model, for encoder nodes
deeper      passes the rows on that a model's first layers add
capability  whether a model has a tower that is known, and what its load needs
rows        keeps the rows on the runner, and puts them into batches; rotary positions of images' tokens
"""
