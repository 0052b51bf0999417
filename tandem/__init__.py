"""The name that Tandem is imported by. Each package lies in the folder of its name at the repository's root; this folder
holds a link to each, so that a user's own `engine.py` or `router/` is never taken for ours."""
