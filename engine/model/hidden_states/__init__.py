"""Hidden states of prompts, in files: see README.md.

capability  whether a load asks for them
experts     which experts the model's routers chose
prompts     collects a prompt's hidden states and writes its file
"""
