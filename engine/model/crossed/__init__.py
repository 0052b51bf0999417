"""Models with an encoder and a decoder (BART, T5): the decoder's layers attend to what the encoder made of the prompt.

capability  which types are known, and how one is loaded
finding     the shape of a model's attention, and the check that parts of a prompt give the same logits
encoding    the runner's part: runs the encoder over a request's prompt
forward     the decoder's pass over a batch, and the cross-attention's keys and values
"""
