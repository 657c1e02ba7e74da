"""Every op in plain torch: the definition, the oracle of the tests, and what runs without compiled ops.

The functions have the names and arguments of `pydflash.ops`, file by file. They compute in float32, or in float64 where
the inputs are float64. p is the target's distribution and q the drafter's, everywhere.
"""

from .attention import block_attention as block_attention
from .caches import cache_append as cache_append
from .caches import context_append as context_append
from .caches import round_commit as round_commit
from .convolutions import block_conv as block_conv
from .linear import packed_linear as packed_linear
from .linear import skinny_linear as skinny_linear
from .norms import add_rms_norm as add_rms_norm
from .norms import head_norm_rope as head_norm_rope
from .norms import swiglu as swiglu
from .numbers import ACCEPT as ACCEPT
from .numbers import DRAFT as DRAFT
from .numbers import RESIDUAL as RESIDUAL
from .numbers import TARGET as TARGET
from .numbers import philox as philox
from .numbers import uniform as uniform
from .paths import path_select as path_select
from .paths import path_tree as path_tree
from .paths import path_viterbi as path_viterbi
from .sampling import filtered_weights as filtered_weights
from .sampling import reject_sample as reject_sample
