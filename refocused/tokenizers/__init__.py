"""Tokenizers: bytes, GPT-2 BPE, tokenizer.json files, the Hugging Face hub."""
