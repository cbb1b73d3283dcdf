"""The one exception for requests that cannot be fulfilled as asked."""


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
        return type(self), (str(self), self.code)
