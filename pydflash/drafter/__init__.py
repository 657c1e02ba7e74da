"""The block-diffusion drafter: its module, its decoder, the names of its tensors."""

from .module import Drafter

__all__ = ["Drafter"]
