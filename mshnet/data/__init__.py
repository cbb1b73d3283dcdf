"""Data: layouts and checks, built-in scenes, augmentation, feeding. Knows nothing of devices."""
