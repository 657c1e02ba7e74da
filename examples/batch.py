"""Answer a file of prompts, one a line, with one call; each prompt keeps its own seed, so answers repeat."""

import argparse
from pathlib import Path

from pydflash import Speculator
from pydflash.checkpoints.smollm2 import ensure_smollm2
from pydflash.cli.demo import packaged_drafters

PROMPTS = ["Name three rivers.", "What is 17 + 25?", "Write a haiku about a mill.", "Why is the sky blue?"]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path, nargs="?", help="a text file; default: four short questions")
    parser.add_argument("--target", help="folder or hub id; default: the demo's SmolLM2-135M")
    parser.add_argument("--drafter", help="folder or hub id; default: the drafter that comes with pydflash")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args(argv)
    target = arguments.target or ensure_smollm2()
    spec = Speculator.from_pretrained(target, arguments.drafter or next(packaged_drafters()))

    prompts = arguments.prompts.read_text().splitlines() if arguments.prompts else PROMPTS
    options = {"max_new_tokens": arguments.max_new_tokens, "temperature": arguments.temperature}
    answers = spec.generate(prompts, seed=list(range(len(prompts))), **options)
    for prompt, out in zip(prompts, answers, strict=True):
        print(
            f"> {prompt}\n{out.text.strip()}\n({out.finish_reason}, {out.stats.acceptance_length:.2f} tokens a round)\n"
        )


if __name__ == "__main__":
    main()
