"""A running loop on a TPU: what was compiled and why, what fell back, what was read, and where."""
