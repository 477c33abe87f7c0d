"""From scored samples to packed micro-batches, the same mean whatever the split."""
