"""All contact with transformers: targets behind the calls of a round, and how their layers are recognised."""

from ..protocols import TargetOutput
from .generic import Target
from .loading import load_tokenizer

__all__ = ["Target", "TargetOutput", "load_tokenizer"]
