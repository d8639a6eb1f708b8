"""Checkpoint directories that the rest of the world can load: config.json and safetensors, and a tokenizer."""
