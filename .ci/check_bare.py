"""Run in an environment that has the wheel and no torch, from outside the source tree.

With PAIR, the folder that .ci/export_pair.py wrote, the wheel must be the pure one, with what it depends on; the pair
then runs on ONNX Runtime.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pydflash
import pydflash.export
from pydflash import _build_info

home = Path(pydflash.__file__).parent
pure = len(sys.argv) > 1
assert importlib.util.find_spec("torch") is None, "this environment must not have torch"
assert home.parent.name == "site-packages", f"pydflash must come from the wheel, not from {home}"
assert Path(pydflash.export.__file__).parent == home / "export", pydflash.export.__file__
assert (home / "models" / "README.md").is_file(), "pydflash/models is not in the wheel"
assert (importlib.util.find_spec("pydflash._cpu") is None) == pure, "pydflash._cpu"
assert set(_build_info.NOT_BUILT) == {"cuda", "sycl"} | ({"cpu"} if pure else set()), _build_info.NOT_BUILT
assert importlib.metadata.version("pydflash") == pydflash.__version__
needs = [text for text in importlib.metadata.requires("pydflash") if "extra ==" not in text]
assert any(text.startswith("torch") for text in needs) != pure, needs


def command(*arguments):
    done = subprocess.run([sys.executable, "-m", "pydflash", *arguments], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


assert command("--version") == (0, f"pydflash {pydflash.__version__}\n", "")
code, out, err = command("info")
assert (code, err) == (0, ""), err
assert (_build_info.NOT_BUILT["cpu"] if pure else "needs torch: pip install torch") in out, out
for arguments in (
    ["generate", "t", "p", "--drafter", "d"],
    ["demo"],
    ["bench", "t", "--drafter", "d", "--prompts", "p"],
    ["calibrate", "t", "--drafter", "d", "--prompts", "p"],
    *(["train", step] for step in ("data", "fit", "toy")),
    ["export", "d", "-o", "o"],
):
    code, out, err = command(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), (arguments, code, out, err)
    assert (" without PYDFLASH_PURE" if pure else ": pip install torch") in err, err
if pure:
    pair = Path(sys.argv[1])
    script = Path(__file__).resolve().parents[1] / "examples" / "onnx_without_torch.py"
    asked = ["--prompt", "abc", "--max-new-tokens", "20"]
    done = subprocess.run([sys.executable, script, pair, *asked], capture_output=True, text=True)
    assert done.stdout.startswith((pair / "text").read_text(encoding="utf-8") + "\n20 tokens in "), done
print(f"pydflash {pydflash.__version__} {'and an exported pair run' if pure else 'runs'} without torch, from {home}")
