"""The version, alone, so that building the package need not import torch."""

__version__ = "0.2.0"
