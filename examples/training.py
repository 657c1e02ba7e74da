"""Train a drafter: the target answers prompts, and a drafter learns those answers. A small run, to see the steps.

It runs the commands that it prints. A real drafter takes thousands of prompts and a GPU: docs/train.md.
"""

import argparse
import shlex
import sys
from pathlib import Path

from pydflash.checkpoints.smollm2 import ensure_smollm2
from pydflash.cli import main as pydflash


def main(argv=None):
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--target", help="folder or hub id; default: the demo's SmolLM2-135M")
    parser.add_argument("--out", type=Path, default=Path("example-drafter"), help="folder for all that is made")
    parser.add_argument("--prompts", type=int, default=32, help="how many sums to ask for")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=1, help="decoder layers of the drafter")
    arguments = parser.parse_args(argv)
    target, out = str(arguments.target or ensure_smollm2()), arguments.out
    out.mkdir(parents=True, exist_ok=True)
    questions = [f"What is {3 * i + 2} plus {5 * i + 1}?" for i in range(arguments.prompts)]
    (out / "prompts.txt").write_text("\n".join(questions))

    data = ["train", "data", target, "--prompts", out / "prompts.txt", "--out", out / "records"]
    data += ["--max-new-tokens", 32, "--temperatures", "0,1"]
    fit = ["train", "fit", target, "--data", out / "records", "--out", out / "drafter", "--layers", arguments.layers]
    fit += ["--max-steps", arguments.steps, "--epochs", arguments.steps, "--batch-size", 8, "--num-anchors", 8]
    use = ["generate", target, "--drafter", out / "drafter", "--max-new-tokens", 32, "What is 20 plus 22?"]
    for step in (data, fit, use):
        command = [str(part) for part in step]
        print("\n$ pydflash", shlex.join(command), flush=True)
        if code := pydflash(command):
            sys.exit(code)


if __name__ == "__main__":
    main()
