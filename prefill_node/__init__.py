"""The producer, in node.py: reads prompts, samples the first token, sends KV, frees blocks when the send is confirmed."""
