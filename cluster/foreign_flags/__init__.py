"""The flags of vLLM and SGLang, each understood or answered."""
