"""The one exception for requests that cannot be fulfilled as asked."""


class RequestError(ValueError):
    """What the user asked for is wrong: the message names the value and the fix.

    The command line prints the message as one line and exits with 2.
    """
