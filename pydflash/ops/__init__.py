"""The native ops: what they compute, with shapes and meanings, a file per topic.

Integer inputs may be int32 or int64. Scalars are accepted where a per-row tensor [B] is meant. The definition of
every op is the function of the same name in `pydflash.ops.reference`. Without compiled ops for its tensors' device an
op raises RuntimeError with the reason.
"""

from . import backends as backends
from . import reference as reference
from . import registry as registry
from .attention import block_attention as block_attention
from .caches import cache_append as cache_append
from .caches import context_append as context_append
from .caches import round_commit as round_commit
from .convolutions import block_conv as block_conv
from .linear import HALF as HALF
from .linear import SKINNY_ROWS as SKINNY_ROWS
from .linear import packed_linear as packed_linear
from .linear import skinny_linear as skinny_linear
from .linear import takes_skinny as takes_skinny
from .norms import add_rms_norm as add_rms_norm
from .norms import head_norm_rope as head_norm_rope
from .norms import swiglu as swiglu
from .paths import path_select as path_select
from .paths import path_tree as path_tree
from .paths import path_viterbi as path_viterbi
from .sampling import reject_sample as reject_sample
