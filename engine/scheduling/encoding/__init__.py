"""Which step encodes a part of an image, and how long its rows are kept.

budget  the account of these rows, with what a step may encode
"""
