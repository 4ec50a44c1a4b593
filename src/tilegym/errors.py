"""The exceptions that users of TileGym see. Every message names what failed, what came, and the remedy."""


class TileGymError(Exception):
    """Base class of TileGym's own errors."""


class BackendError(TileGymError, RuntimeError):
    """A backend that was asked for is unknown, or cannot run on this machine."""


class RegistrationError(TileGymError, TypeError):
    """An implementation does not fit the op that it was registered for."""


class UnsupportedError(TileGymError, NotImplementedError):
    """An implementation does not support this call's dtype, shape, device or option.

    An implementation raises it before it has changed anything; the dispatcher then takes the ``pytorch``
    implementation, or, under ``DISABLE_FALLBACK=1``, passes the error on.
    """


class FallbackWarning(UserWarning):
    """A call went to the ``pytorch`` backend instead of the chosen one; given once per op, backend and reason."""


class PatchError(TileGymError, RuntimeError):
    """A patch could not be applied; what had been applied of it was undone."""


class FlagError(PatchError, TypeError):
    """A flag names nothing that TileGym computes in any model."""


class ModelError(TileGymError, ValueError):
    """A model, config or input cannot be used the way it was asked for."""


class LateLogitsError(TileGymError, RuntimeError):
    """Logits that a patched model did not compute beside its loss cannot be computed any more, or not be used so."""


class InventoryError(TileGymError, ValueError):
    """A Definition or Solution is missing, breaks a rule, or cannot be run."""


class KernelError(TileGymError, ValueError):
    """A kernel cannot be registered, loaded or applied as asked."""


class KernelWarning(UserWarning):
    """A registered kernel was not applied; given once per kernel and reason."""


class AutokernelError(TileGymError, RuntimeError):
    """The auto-kernelize loop cannot start or go on: the repository, the device, the model or a setting."""
