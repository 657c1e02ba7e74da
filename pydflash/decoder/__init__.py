"""A decoder as data: records of layers, weight formats, stores of committed positions, and what runs them."""
