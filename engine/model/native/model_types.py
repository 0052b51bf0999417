"""The types of models that the library computes. Commands look at it, so it imports nothing."""

# Models of one type are computed alike, whatever they are called. SmolLM2, for example, is a Llama.
NATIVE_TYPES = ("llama", "mistral", "qwen2", "qwen3")
