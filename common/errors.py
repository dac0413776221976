"""The one exception for input that a user can mend."""


class InputError(ValueError):
    """A one-line account of what is wrong with the input and how to mend it.

    Commands print it on one rank and exit with status 2, without a traceback.
    """
