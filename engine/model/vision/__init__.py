"""Models that read images: what their vision tower makes of an image takes the place of its placeholders' embeddings.

tower       from image files to the rows that stand for their parts
alone       a tower without its model, for encoder nodes
rows        which of these the runner keeps, where a step's rows want them, and their positions where a model counts by rows and columns
"""
