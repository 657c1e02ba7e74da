"""Every op in plain torch: the definition, the oracle of the tests, and what runs without compiled ops.

The functions have the names and arguments of `pydflash.ops`, file by file. They compute in float32, or in float64 where
the inputs are float64. p is the target's distribution and q the drafter's, everywhere.
"""

# ruff: noqa: F403  # so that a new op of a topic is named in its topic alone
from .attention import *
from .caches import *
from .convolutions import *
from .gates import *
from .linear import *
from .norms import *
from .numbers import *
from .paths import *
from .recurrent import *
from .sampling import *
