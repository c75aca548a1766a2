"""A CPU platform for verl, chosen by VERL_PLATFORM; VERL_USE_EXTERNAL_MODULES names this module."""

from types import SimpleNamespace

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

MEMORY = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
DEVICE = {
    **vars(torch.cpu),
    **dict.fromkeys(MEMORY, lambda: 0),
    "mem_get_info": lambda: (0, 0),
    "get_device_name": lambda: "CPU",
    "get_rng_state": torch.get_rng_state,
    "set_rng_state": torch.set_rng_state,
}


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformCUDA):
    """A platform like verl's for CUDA, with what a CPU has."""

    device_name = "cpu"
    vendor_name = "generic"
    device_module = SimpleNamespace(**DEVICE)

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, *_, **__):
        """Does nothing: there is one device, whose operations are complete when they return. Torch caches nothing."""

    synchronize = empty_cache = set_device

    def communication_backend_name(self):
        return "gloo"
