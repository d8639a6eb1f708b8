"""Checkpoint directories in the format of Hugging Face: config.json, safetensors and a tokenizer."""
