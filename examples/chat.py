"""A chat in the terminal, streamed, with the acceptance length after each answer; an empty line ends it."""

import argparse

from pydflash import Speculator
from pydflash.checkpoints.smollm2 import ensure_smollm2
from pydflash.cli.demo import packaged_drafters


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", help="folder or hub id; default: the demo's SmolLM2-135M")
    parser.add_argument("--drafter", help="folder or hub id; default: the drafter that comes with pydflash")
    parser.add_argument("--system", help="a system message")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    arguments = parser.parse_args(argv)
    target = arguments.target or ensure_smollm2()
    spec = Speculator.from_pretrained(target, arguments.drafter or next(packaged_drafters()))

    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    while True:
        try:
            question = input("you> ").strip()
        except EOFError:
            break
        if not question:
            break
        messages.append({"role": "user", "content": question})
        stream = spec.stream(messages, arguments.max_new_tokens, temperature=arguments.temperature)
        for chunk in stream:
            print(chunk.text, end="", flush=True)
        messages.append({"role": "assistant", "content": stream.output.text})
        print(f"\n({stream.output.stats.summary()})")


if __name__ == "__main__":
    main()
