"""One round's tree for people: as text on a terminal, or as an SVG picture."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..checkpoints.files import write_file

if TYPE_CHECKING:
    from rich.tree import Tree

    from ..request import Generation


def accepted_path(tokens: Sequence[int], parents: Sequence[int], kept: Sequence[int]) -> list[int]:
    """The slots, anchor first, of the kept drafts."""
    path = [0]
    for token in kept:
        children = [i for i in range(1, len(tokens)) if parents[i] == path[-1] and tokens[i] == token]
        path.append(children[0])
    return path


def render_tree(
    tokens: Sequence[int], parents: Sequence[int], emitted: Sequence[int], text_of: Callable[[int], str]
) -> Tree:
    """A rich tree of the drafts with the kept path marked and the target's own token at its end.

    Args:
        tokens, parents: A proposal of `stats.proposals`.
        emitted: What the round added: the kept drafts and the bonus token.
        text_of: The text of a token id.
    """
    from rich.text import Text
    from rich.tree import Tree

    path = accepted_path(tokens, parents, emitted[:-1])
    nodes = {0: Tree(Text(f"{text_of(tokens[0])!r} (anchor)", style="bold"))}
    for slot in range(1, len(tokens)):
        kept = slot in path
        text = Text(f"{text_of(tokens[slot])!r}{' kept' if kept else ''}", style="bold green" if kept else "dim")
        nodes[slot] = nodes[parents[slot]].add(text)
    nodes[path[-1]].add(Text(f"{text_of(emitted[-1])!r} (the target's own)", style="bold yellow"))
    return nodes[0]


class TreeOfRound(NamedTuple):
    """The tree of one round, ready to be shown."""

    title: str
    tree: Tree

    @classmethod
    def of(cls, output: Generation, text_of: Callable[[int], str]) -> TreeOfRound:
        """The round of `output` that kept most drafts.

        Raises: ValueError where no round verified a tree, or its proposals were not kept.
        """
        stats = output.stats
        proposals = stats.proposals or []
        found = [i for i, proposal in enumerate(proposals) if isinstance(proposal, tuple)]
        if not found:
            raise ValueError(
                "show-tree: output must have a round with a tree (path 'tree', return_proposals), got none"
            )
        number = max(found, key=lambda i: (stats.num_accepted[i], -i))
        start = 1 + sum(n + 1 for n in stats.num_accepted[:number])  # the prefill's token belongs to no round
        tokens, parents = proposals[number]
        emitted = output.token_ids[start : start + stats.num_accepted[number] + 1]
        title = f"round {number + 1} of {stats.rounds}: {len(tokens) - 1} drafts verified, {len(emitted) - 1} kept"
        return cls(title, render_tree(tokens, parents, emitted, text_of))

    def print(self) -> None:
        """As text on stderr."""
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
        console.print(self.title)
        console.print(self.tree)

    def save_svg(self, path: str | Path) -> None:
        """As a picture, in one step, with the viewer's own fonts: nothing is loaded from the net."""
        from rich.console import Console

        console = Console(record=True, width=100, file=io.StringIO(), highlight=False)
        console.print(self.tree)
        svg = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=self.title), flags=re.DOTALL)
        write_file(Path(path), lambda part: part.write_text(svg, encoding="utf-8"))
