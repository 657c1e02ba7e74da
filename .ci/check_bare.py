"""Run in an environment that has the wheel and nothing else, from outside the source tree."""

import importlib.metadata
import importlib.util
from pathlib import Path

import pydflash
import pydflash.export
from pydflash import _build_info

home = Path(pydflash.__file__).parent
assert importlib.util.find_spec("torch") is None, "this environment must not have torch"
assert home.parent.name == "site-packages", f"pydflash must come from the wheel, not from {home}"
assert Path(pydflash.export.__file__).parent == home / "export", pydflash.export.__file__
assert (home / "models" / "README.md").is_file(), "pydflash/models is not in the wheel"
assert importlib.util.find_spec("pydflash._cpu") is not None, "pydflash._cpu is not in the wheel"
assert set(_build_info.NOT_BUILT) == {"cuda", "sycl"}, _build_info.NOT_BUILT
assert importlib.metadata.version("pydflash") == pydflash.__version__
print(f"pydflash {pydflash.__version__} imports without torch, from {home}")
