"""One registry of kernels for whole layers and for single functions, and one entry point that applies both to a model.

Built on the package ``kernels`` of Hugging Face: its modes, its layer repositories, its Hub loading. See
docs/kernel-registry.md.
"""

from collections.abc import Mapping
from typing import Any

from tilegym.kernel import own
from tilegym.kernel import registry
from tilegym.kernel.function import apply_function_kernel
from tilegym.kernel.function import register_function_kernel
from tilegym.kernel.kernelize import kernelize_model
from tilegym.kernel.kernelize import report
from tilegym.kernel.kernelize import unkernelize_model
from tilegym.kernel.layer import apply_layer_kernel
from tilegym.kernel.layer import register_external_layer
from tilegym.kernel.layer import register_layer_kernel


def register_kernels(config: Mapping[str, Any]) -> None:
    """Registers the layer kernels of ``config["layers"]`` and the function kernels of ``config["functions"]``.

    Each maps a name to the other arguments of :func:`register_layer_kernel` or :func:`register_function_kernel`. The
    whole of it is checked first and registered together or not at all; ``config`` is not changed.

    Raises:
        KernelError: listing everything that is wrong, with its place.
    """
    from tilegym.kernel import config as batch  # pydantic is imported where it is used

    registry.add(*batch.records(config, "register_kernels"))


own.register()
