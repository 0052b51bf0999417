"""Models that read images: rows from the vision tower replace the embeddings of an image's placeholders.

tower       encodes the parts of image files into rows
alone       loads a vision tower without its model, for encoder nodes
rows        keeps the rows on the runner, and puts them into batches; rotary positions of images' tokens
"""
