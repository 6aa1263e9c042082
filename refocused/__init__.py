"""refocused: pre-training of ~1B language models with DeepSpeed, from a bucket of tokens."""

__version__ = "0.1.0"
