"""Tools for PyTorch/XLA that know nothing of the detector; the only place that imports it."""
