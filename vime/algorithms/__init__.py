"""Advantages and losses as pure tensor functions: no torch.distributed, no configuration beyond plain numbers."""
