"""Imported first by the package, so that no module of ours can load `megatron` before the CPU layer is in place."""

from vime.backends.megatron_utils.cpu import enable_without_cuda

ACTIVE: bool = enable_without_cuda()
