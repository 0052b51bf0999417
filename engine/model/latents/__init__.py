"""Multi-head latent attention, on any device.

attention  finds how layers make keys and values from latents, and attends to the latents that the cache keeps
"""
