"""A drafter of your own: anything with a config and three methods. This one drafts by a table of word pairs."""

import argparse
from itertools import pairwise
from types import SimpleNamespace

import torch

from pydflash import Speculator
from pydflash.checkpoints.smollm2 import ensure_smollm2
from pydflash.protocols import Proposal

TEXT = "One plus one is two. Two plus two is four. Three plus three is six. Four plus four is eight. "


class PairDrafter:
    """Drafts, after each token, the one that followed it last in a text. Wrong drafts cost time, never the text."""

    def __init__(self, ids, block_size=8):
        self.follower = dict(pairwise(ids))
        self.config = SimpleNamespace(block_size=block_size, target_layer_ids=(0,), num_candidates=1, version=1)

    def new_cache(self, batch, capacity):
        return []  # a real drafter keeps what it has read of the target's features here

    def append_context(self, features, cache, counts=None):
        """features [B, C, F * H] of the positions that were committed since the last call."""

    def propose(self, anchors, cache, *, block_size=None, **_):
        """Tokens [B, S-1] after the anchors [B]; candidates [B, S-1, K] are what a tree would choose from."""
        rows = [[token] for token in anchors.tolist()]
        for row in rows:
            for _ in range((block_size or self.config.block_size) - 1):
                row.append(self.follower.get(row[-1], row[-1]))
        tokens = torch.tensor(rows, device=anchors.device)[:, 1:]
        return Proposal(tokens, tokens[..., None], None, torch.zeros(*tokens.shape, 1, device=anchors.device))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default=TEXT + "One plus one is")
    parser.add_argument("--target", help="folder or hub id; default: the demo's SmolLM2-135M")
    arguments = parser.parse_args(argv)
    plain = Speculator.from_pretrained(arguments.target or ensure_smollm2(), None)
    drafter = PairDrafter(plain.tokenizer(arguments.prompt)["input_ids"])
    spec = Speculator(plain.target, drafter, plain.tokenizer)

    options = {"max_new_tokens": 48, "temperature": 0.0, "chat_template": False}
    out = spec.generate(arguments.prompt, **options)
    print(f"{out.text}\n{out.stats.summary()}")
    print("the plain text:", out.token_ids == plain.generate(arguments.prompt, **options).token_ids)


if __name__ == "__main__":
    main()
