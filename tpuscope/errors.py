"""The exceptions that the command line turns into one line and an exit code."""


def printable(text: str) -> str:
    """Return text with control characters and undecodable bytes as backslash escapes.

    Names come from lists, archives and folders that others made; printed as they are, they could
    steer the terminal or fail to encode. Line ends stay.
    """
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


class RequestError(ValueError):
    """The request is wrong: the message names the offending value and the fix.

    The command line prints the message as one line and exits with 2.

    Args:
        message: one line for people; made :func:`printable`.
        code: what kind of fault it is, in a few words with hyphens (``"damaged-file"``), for
            programs and tests; messages may be reworded, codes stay.
    """

    def __init__(self, message: str, code: str = "request"):
        super().__init__(printable(message))
        self.code = code

    def __reduce__(self):
        return type(self), (self.args[0], self.code)


class Failed(RuntimeError):
    """The request was right, and the work failed: a process was killed, a service refused.

    The command line prints the message and exits with 1.

    Args:
        message: for people.
        code: the kind of failure, as in :class:`RequestError`.
    """

    def __init__(self, message: str, code: str = "failed"):
        super().__init__(message)
        self.code = code

    def __reduce__(self):
        return type(self), (self.args[0], self.code)
