"""Training of the small demonstration model: texts, tokenizer and loop."""
