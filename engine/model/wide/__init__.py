"""One model on several ranks: tensor parallel and pipeline parallel. Each rank keeps the KV of its own heads or layers.

capability   what a rank's load needs, and which models it refuses
plan         whether a model can be cut, by transformers' tensor-parallel plan
cut          tensor parallel: loads one rank's part, and makes the parts compute together what the whole layers do
joint_sums   one sum over ranks for a mixture's routed and shared experts
stages       pipeline parallel: which layers a rank has, and how stages pass hidden states on
forward      rank 0 sends each step to the other ranks as arrays; they follow
"""
