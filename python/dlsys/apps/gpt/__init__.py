"""`dlsys gpt`: trains a GPT on text, writes with it, and measures it."""
