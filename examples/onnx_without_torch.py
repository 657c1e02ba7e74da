"""Text from an exported target and drafter, on ONNX Runtime, without torch. Make the folder once, where torch is:

pydflash export models/smollm2-135m-instruct-dflash2 --target smollm2 -o smollm2-onnx --profile inplace --with-target
"""

import argparse

import numpy as np
from tokenizers import Tokenizer

from pydflash.export import OnnxDrafter, OnnxTarget


def main(argv=None):
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("folder", nargs="?", default="smollm2-onnx", help="what `pydflash export` wrote")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    arguments = parser.parse_args(argv)
    target, drafter = OnnxTarget(arguments.folder), OnnxDrafter(arguments.folder)
    tokenizer = Tokenizer.from_file(f"{arguments.folder}/tokenizer.json")

    ids = tokenizer.encode(arguments.prompt).ids
    end = len(ids) + arguments.max_new_tokens
    cache, context = target.new_cache(1, end), drafter.new_cache(1, end + drafter.config.block_size)
    logits, features = target.run(np.array([ids]), cache, np.array([len(ids) - 1]))
    cache.length, rounds = len(ids), 0
    ids.append(int(logits[0, 0].argmax()))
    while len(ids) < end:
        drafter.append_context(features, context)
        block = [ids[-1], *drafter.propose(np.array(ids[-1:]), context).tokens[0].tolist()]
        logits, features = target.run(np.array([block]), cache, np.arange(len(block)))
        best = logits[0].argmax(-1).tolist()  # the target's own token after each slot
        kept = next((i for i, draft in enumerate(block[1:]) if draft != best[i]), len(block) - 1)
        ids += best[: kept + 1]
        features, rounds = features[:, : kept + 1], rounds + 1
        cache.length += kept + 1
    print(tokenizer.decode(ids[:end]))
    print(f"{arguments.max_new_tokens} tokens in {rounds} rounds")


if __name__ == "__main__":
    main()
