"""Rounds: draft, verify, accept, commit; which drafts are verified; and the loops that run them."""
