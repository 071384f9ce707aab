"""The errors of the package. All are ValueErrors; the subclasses exist so that callers can tell them apart."""


class PatchbayesError(ValueError):
    """Something given to patchbayes cannot be used; the message says where, what, what is required, what to do."""


class NothingToPatch(PatchbayesError):
    """No module of the network matched the wanted sites."""


class NotASite(PatchbayesError):
    """A method cannot be put on this layer; `patch_` passes it over and says why."""


class NotPatched(PatchbayesError):
    """A patched network is needed, and this one is not."""


class TooManyOutcomes(PatchbayesError):
    """Enumeration was asked for where the number of distinct networks is too large or infinite."""


class WrongDraws(PatchbayesError):
    """The draws were made for another network."""


class CheckpointMismatch(PatchbayesError):
    """A file does not fit the network it is loaded into, or is not one of ours."""


class UntrustedCode(PatchbayesError):
    """A file names code of a Python module, and nobody has said that it may be run."""
