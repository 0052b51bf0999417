"""The OpenAI API: its request types and their checks, sampling, and the answers, streamed or whole."""
