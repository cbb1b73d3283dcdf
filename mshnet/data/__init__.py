"""Data: layouts and checks, built-in scenes, augmentation, loaders. Imports no device code."""
