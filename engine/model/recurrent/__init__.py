"""Layers that keep a state of all tokens before, where attention keeps keys and values of each.

layout     where in a request's blocks each state lies; read from there and written back
mixers     the modules that keep states: found by running the model once, then computed request by request
own_states modules of transformers that keep states in themselves
"""
