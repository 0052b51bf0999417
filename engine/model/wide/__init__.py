"""One model on several ranks: each holds a part of every layer's weights, and the KV of its own heads.

shard        which rank this is, and how it reaches the others
heads        which heads of keys and values a rank keeps
plan         whether, and by which rules of transformers, a model can be cut
cut          loads one rank's part, and makes of its layers what they are together
batches      a batch as bytes
forward      rank 0 tells the others what to compute; they follow
"""
