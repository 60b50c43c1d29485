"""The one exception type that this package raises on purpose."""


class HysteresisError(Exception):
    """Bad input, a damaged file, or a measurement that has no answer.

    The message names what was wrong, the value that was found, and the rule it breaks. The command
    line prints it without a traceback and exits with code 2.
    """
