"""Backends: which there are, which one serves a call, and which op has an implementation where."""

from tilegym.backend.dispatcher import dispatch
from tilegym.backend.dispatcher import get_available_backends_for_op
from tilegym.backend.dispatcher import get_registry_info
from tilegym.backend.dispatcher import has_backend_impl
from tilegym.backend.dispatcher import observe_calls
from tilegym.backend.dispatcher import print_registry_info
from tilegym.backend.dispatcher import register_impl
from tilegym.backend.selector import PREFER_CUTILE
from tilegym.backend.selector import assert_backend_available
from tilegym.backend.selector import get_available_backends
from tilegym.backend.selector import get_current_backend
from tilegym.backend.selector import is_backend_available
from tilegym.backend.selector import name_of
from tilegym.backend.selector import register_backend
from tilegym.backend.selector import set_backend
from tilegym.backend.selector import use_backend
