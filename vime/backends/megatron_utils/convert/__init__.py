"""Weights between Hugging Face folders and Megatron's shards: invertible op lists, one short file per model family."""
