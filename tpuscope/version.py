"""The version of both packages, in its own file: building them does not import torch."""

__version__ = "0.2.0"
