"""Recurrent layers, which keep a state of all tokens before instead of each token's keys and values.

joined     what the general path finds here
layout     where each state is in a request's blocks; reads and writes states there
mixers     the modules that keep states: finds them by running the model once, and computes them request by request
own_states changes modules of transformers that keep states in themselves
"""
