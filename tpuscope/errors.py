"""The exceptions that the command line turns into one line and an exit code."""


class RequestError(ValueError):
    """The request is wrong: the message names the offending value and the fix.

    The command line prints the message as one line and exits with 2.

    Args:
        message: one line for people.
        code: what kind of fault it is, in a few words with hyphens (``"damaged-file"``), for
            programs and tests; messages may be reworded, codes stay.
    """

    def __init__(self, message: str, code: str = "request"):
        super().__init__(message)
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
