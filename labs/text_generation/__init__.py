"""Text generation on XLA with growing, padded and static shapes (lab 12).

* :mod:`decoder`: a small Llama of transformers over bytes, trained on a text of ours;
* :mod:`ways`: three ways to generate, one loop for all of them;
* :mod:`look`: counts and times, and the decoder on the host beside the one on the device;
* :mod:`bits`: weights of 8 bits, and what torch_xla does with such types today.

Sources: source documents 3 (a test bench for language models) and 5 (XLA text generation).
"""
