"""From defaults, a file, the environment and flags to one configuration, or to all mistakes at once.

names      finds a setting by its name
layers     reads each source
combined   combines them; later ones win
rules      what must hold between settings
schema     tells editors what a file may say
"""
