"""Megatron-Core as the trainer. Importing this package prepares `megatron` for machines without CUDA (see `cpu`)."""

from vime.backends.megatron_utils import cpu_activate as cpu_activate
