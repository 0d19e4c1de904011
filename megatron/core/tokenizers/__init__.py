"""Tokenizers: text to token ids and back. Torch-free."""
