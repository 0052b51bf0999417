"""Every figure that is claimed anywhere, each made by one command from the repository's root."""
