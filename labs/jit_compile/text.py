"""Characters as numbers, and prompts padded to a multiple; no framework.

The vocabulary is ASCII, so that there is nothing to download.
"""

import numpy as np

from tpuscope.errors import RequestError

CHARACTERS = 128  # the vocabulary
LONGEST = 64  # text that the generator can see, characters

TEXT = """\
A target far away fills a few pixels. A glint on the sea looks like a target, and so does the edge
of a cloud. A new shape is a new program. Pad the prompt, and the shape stays. The first prompt
waits for the compiler. The second finds the program, and so does the third.
"""


def up_to(number: int, multiple: int) -> int:
    """Round up to the next multiple.

    Raises:
        RequestError: the multiple is not positive.
    """
    if multiple < 1:
        raise RequestError(f"multiple is {multiple}; it has to be 1 or more")
    return -(-number // multiple) * multiple


def encode(text: str) -> np.ndarray:
    """Return the characters of a text as token ids: int32 (length,).

    Raises:
        RequestError: the text is empty, or has a character that is not ASCII.
    """
    if not text:
        raise RequestError("the text is empty; give it at least one character")
    tokens = np.array([ord(character) for character in text], np.int32)
    if tokens.max() >= CHARACTERS:
        strange = text[int(tokens.argmax())]
        raise RequestError(f"{strange!r} is not ASCII; the generator knows no other characters")
    return tokens


def room(length: int, new: int, multiple: int = 1) -> int:
    """Return a buffer's length: the prompt, padded to a multiple, and the new characters.

    Raises:
        RequestError: nothing new, or more than the generator can see.
    """
    if new < 1:
        raise RequestError(f"new is {new}; ask for 1 character or more")
    total = up_to(length, multiple) + new
    if total > LONGEST:
        raise RequestError(
            f"{length} characters, padded to a multiple of {multiple}, and {new} new ones are "
            f"{total}; the generator sees {LONGEST}"
        )
    return total


def buffer(text: str, new: int, multiple: int = 1) -> tuple[np.ndarray, int]:
    """Return a prompt with room behind it, int32 (1, :func:`room`), and the prompt's length.

    What is not written yet is 0; causal attention never looks there.
    """
    tokens = encode(text)
    padded = np.zeros((1, room(len(tokens), new, multiple)), np.int32)
    padded[0, : len(tokens)] = tokens
    return padded, len(tokens)


def decode(tokens: np.ndarray) -> str:
    """Return the text of token ids."""
    return "".join(map(chr, tokens))
