"""LLaMA: config, norm, rope, attention, swiglu, llama; checkpoint and tokenizer around it."""
