"""OpenAI's realtime events, as far as they are text: what a client may say, and the conversation that it makes. No I/O."""
