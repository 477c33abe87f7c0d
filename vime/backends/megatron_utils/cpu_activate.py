"""Imported first by the package: no module of ours can load `megatron` before the CPU layer is in place and it is quiet."""

import logging
import warnings

from vime.backends.megatron_utils.cpu import enable_without_cuda


def _quiet() -> None:
    """Keep what Megatron says at every start out of the logs: what is of importance it raises."""
    warnings.filterwarnings("ignore", module=r"megatron\.")  # "Transformer Engine and Apex are not installed", a dozen times
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")  # of what Megatron calls
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint\.")
    logging.getLogger("megatron").setLevel(logging.ERROR)


_quiet()
ACTIVE: bool = enable_without_cuda()
