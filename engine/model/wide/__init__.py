"""One model on several ranks: each holds a part of every layer's weights, and the KV of its own heads.

shard        which rank this is, which heads of keys and values it keeps, and how it reaches the others
plan         whether, and by which rules of transformers, a model can be cut
cut          loads one rank's part, and makes of its layers what they are together
stages       which layers a rank has, where the ranks follow one another in a pipeline
forward      rank 0 tells the others what to compute, as arrays; they follow
"""
