"""vime: RL post-training for large language models. Megatron-Core trains, vLLM generates, Ray places them."""

__version__ = "0.1.0"
