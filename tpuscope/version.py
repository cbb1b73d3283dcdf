"""The version of both packages, alone, so that building them need not import torch."""

__version__ = "0.2.0"
