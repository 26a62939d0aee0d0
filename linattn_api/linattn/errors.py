"""Every error linattn raises.

::

    LinattnError
    ├── ArgumentError        (ValueError)           the call is wrong
    │   ├── ShapeError                              a rank or a size
    │   ├── DtypeError       (TypeError)            a dtype
    │   ├── DeviceError                             arrays on different devices
    │   ├── FrameworkError   (TypeError)            not an array, or arrays of different frameworks
    │   ├── OptionError                             a flag, form, feature map or combination of flags
    │   └── ContextError                            how a sequence is spread over devices, or ranks that disagree about it
    └── BackendError         (RuntimeError)         the choice of backend is wrong
        ├── UnknownBackend   (LookupError)          no backend of that name
        ├── BackendConflict                         two distributions claim one name
        ├── BackendVersionError                     built for another API version
        ├── BackendLoadError                        the plug-in failed to import
        ├── BackendContractError                    the plug-in's methods do not match the spec
        └── Unsupported      (NotImplementedError)  the backend declares that it cannot run this call

An exception raised inside a backend's kernel is none of these: it reaches the caller unchanged.

Of a valid call whose result may be of no use there are warnings::

    UserWarning
    ├── SignedWeightsWarning    a denominator that can come close to zero
    ├── InputWarning            inputs that look like a mistake
    └── NonFiniteWarning        a result that is not finite (inside ``linattn.debug`` only)
"""

from __future__ import annotations


class LinattnError(Exception):
    """Base of every error raised by linattn."""


class ArgumentError(LinattnError, ValueError):
    """An argument of an operator call is wrong."""


class ShapeError(ArgumentError):
    """An array has the wrong rank or size."""


class DtypeError(ArgumentError, TypeError):
    """An array has the wrong dtype."""


class DeviceError(ArgumentError):
    """The arrays of one call live on different devices."""


class FrameworkError(ArgumentError, TypeError):
    """An argument is not an array, or the arrays of one call come from different frameworks."""


class OptionError(ArgumentError):
    """A flag, form or feature map is wrong, or two of them exclude each other."""


class ContextError(ArgumentError):
    """How a sequence is spread over devices is wrong, or the ranks that share it do not agree. Every rank raises it."""


class BackendError(LinattnError, RuntimeError):
    """A backend cannot be found, loaded or used."""


class UnknownBackend(BackendError, LookupError):
    """No installed or registered backend has this name."""


class BackendConflict(BackendError):
    """Two installed distributions claim the same backend name."""


class BackendVersionError(BackendError):
    """A plug-in was built for another version of the plug-in API."""


class BackendLoadError(BackendError):
    """A plug-in raised while it was being imported or created."""


class BackendContractError(BackendError):
    """A plug-in's class does not meet the plug-in contract."""


class Unsupported(BackendError, NotImplementedError):
    """A backend's declaration that it cannot run a call.

    Backends *return* it from ``supports`` (never raise it there); the dispatcher raises it when no candidate is left.

    Args:
        reason: One sentence fragment that says what is missing, e.g. ``"K must be at most 256, got 512"``.
    """


class SignedWeightsWarning(UserWarning):
    """``normalize=True`` with a feature map whose weights can be negative: the denominator can come close to zero."""


class InputWarning(UserWarning):
    """The inputs of a valid call look like a mistake: a decay that grows, long keys, heads before time. Says how to mend it."""


class NonFiniteWarning(UserWarning):
    """Inside :func:`linattn.debug`: a result is not finite. Says at which token and head first, and the likely cause."""
