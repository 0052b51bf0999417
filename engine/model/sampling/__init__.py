"""How a token is chosen from logits."""
