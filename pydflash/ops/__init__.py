"""The native ops: what they compute, with shapes and meanings, a file per topic.

Integer inputs may be int32 or int64. Scalars are accepted where a per-row tensor [B] is meant. The definition of
every op is the function of the same name in `pydflash.ops.reference`. Without compiled ops for its tensors' device an
op raises RuntimeError with the reason.
"""

# ruff: noqa: F403  # so that a new op of a topic is named in its topic alone
from . import backends as backends
from . import reference as reference
from . import registry as registry
from .attention import *
from .caches import *
from .convolutions import *
from .gates import *
from .linear import *
from .norms import *
from .paths import *
from .recurrent import *
from .sampling import *
