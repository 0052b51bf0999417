"""The text part of OpenAI's realtime events: what a client may send, and the conversation that it makes. No
I/O."""
