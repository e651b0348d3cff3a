"""Other implementations of the same work, each with the same inputs, sets, mask, dtype, outputs and stage boundary."""
